"""Several cross-compiled entries, one of them with a host region. The builds interpret them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import cgcompile
from cgbundle.format import file_names
from cgbundle.format.file_names import all_programs
from cgbundle.format.schema import Donation, Manifest
from cgcompile.targets.cuda import host_regions
from cgcompile.targets.cuda.donations import DonatedOutput, donated_outputs
from tests.golden.models import traced_entries
from tests.helpers.lowered_here import lower_here
from tests.helpers.raising import raises
from tests.helpers.uncompiled import uncompiled


@pytest.fixture(autouse=True)
def lowered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_here(monkeypatch)


class Hosted(nn.Module):
    """One entry reads a number from a tensor on the host, the other does not; both use the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(8))

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        self.total += self.linear(x).sum(0)
        return self.linear(x).relu().sum(1)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.linear(x).relu())
        return self.linear(self.linear(y / (y.abs().sum().item() + 1.0)) + self.total)


def rows(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 8),)


def check_shared(manifest: Manifest) -> None:
    """Checks that shared data is stored once and that the arena is the largest of all programs'."""
    memories, programs = dict(manifest.memories), all_programs(manifest)
    assert memories["arena"] == max(program.arena for program in programs)
    assert memories["inputs"] == max(program.static for program in programs)
    assert len({weight.name for weight in manifest.weights}) == len(manifest.weights)
    files = [file.path for file in manifest.files]
    assert len(files) == len(set(files)) and {step.file for program in programs for step in program.steps} - {""} <= set(files)
    assert {proof.method for entry in manifest.entries for proof in entry.self_test.proofs} == {"interpret"}


def test_traced_entries_share_what_they_have(tmp_path: Path) -> None:
    model, entries = traced_entries()
    built = cgcompile.build(model, entries, sizes=["batch=4", "fill:rows=2"], out=tmp_path / "lanes.cgb", target="sm_90")
    check_shared(built.manifest)
    assert [entry.name for entry in built.manifest.entries] == ["forward", "fill", "empty"]
    assert [file.path for file in built.manifest.files if file.path.endswith(".pt2")] == [
        "program.pt2", "programs/empty.pt2", "programs/fill.pt2",
    ]  # fmt: skip
    assert {file.path for file in built.manifest.files if file.path.startswith(file_names.GRAPHS)} == {
        "graphs/model-empty.bin", "graphs/model-fill-2.bin", "graphs/model-forward-4.bin",
    }  # fmt: skip


def test_an_entry_beside_the_host_and_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_regions, "compile_host_regions", uncompiled)
    torch.manual_seed(0)
    entries = {"plain": rows, "scaled": rows}
    donations = [("scaled", "plain.x"), ("scaled", "scaled.x")]
    built = cgcompile.build(Hosted(), entries, donations=donations, sizes=[4], out=tmp_path / "hosted.cgb", target="sm_90")
    check_shared(built.manifest)
    kinds = {entry.name: [step.kind for step in entry.programs[0].steps] for entry in built.manifest.entries}
    assert kinds["plain"] == ["graph"]
    assert "host" in kinds["scaled"] and kinds["scaled"].count("graph") == 2
    assert dict(built.manifest.memories)["host"] > 0
    (reserved,) = built.manifest.donated
    assert (reserved.entry, reserved.offset, reserved.bytes) == ("scaled", 0, 256 + 256)  # the last graph's output, and PAD
    assert [(row.source, row.target) for row in built.manifest.donations] == [
        ("scaled", "plain"),
        ("scaled", "scaled"),
    ]


@pytest.mark.parametrize("sizes", [[1, 4], ["fill:rows=2"], ["batch=1,4", "rows=2", "encode:rows=2"]])
def test_sizes_that_do_not_fit_the_entries(tmp_path: Path, sizes: list[int] | list[str]) -> None:
    model, entries = traced_entries()
    with raises("sizes-invalid"):
        cgcompile.build(model, entries, sizes=sizes, out=tmp_path / "lanes.cgb", target="sm_90")
    assert list(tmp_path.iterdir()) == []


def test_a_donation_from_what_the_host_makes() -> None:
    regions = (SimpleNamespace(kind="graph", outputs=("a",)), SimpleNamespace(kind="host", outputs=("b",)))
    split: Any = SimpleNamespace(partitions={(4,): SimpleNamespace(outputs=("a", "b"), regions=regions)})
    entry = SimpleNamespace(name="forward", keys=((4,),))

    def spec(output: int) -> Any:
        donation = Donation(source="forward", output=output, target="forward", input=0)
        return SimpleNamespace(entries=(entry,), donations=(donation,))

    assert donated_outputs(spec(0), split)[4,] == (DonatedOutput(entry="forward", number=0, region=0, output=0),)
    with raises("donation-refused", match=r"output 1 of forward\(\) is computed on the host"):
        donated_outputs(spec(1), split)
