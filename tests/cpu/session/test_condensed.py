"""A bundle with outputs and state that are large compared to its weights: the self-test is small and still detects errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cgbundle.format import safetensors_files
from cgcompile.bundle import manifest_text

torch = pytest.importorskip("torch")

import cgcompile  # noqa: E402
from cgbundle import self_test  # noqa: E402
from cgbundle.format import archive, file_names  # noqa: E402
from cgcompile.bundle.emit import seal  # noqa: E402
from cgcompile.targets.instruction_sets import LEVELS, common_level  # noqa: E402
from cgcompile_cli.main import app  # noqa: E402

ROWS, COLUMNS = 2200, 4096
"""float32 of 34 MiB."""


class Outer(torch.nn.Module):
    """Returns an outer product, which is also added to state, and which of its elements are above a threshold (bool)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, COLUMNS))
        self.register_buffer("total", torch.zeros(ROWS, COLUMNS))
        self.total: torch.Tensor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x[:, None].sin() * self.weight
        self.total += product
        return product, product > 0.5


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("condensed") / "outer.cgb"
    return cgcompile.build(Outer(), lambda: (torch.randn(ROWS),), out=path, target="cpu").path


def test_variants_share_a_self_test_that_is_condensed(bundle: Path, tmp_path: Path) -> None:
    if common_level("x86_64", {name for level in LEVELS for name in level.features}) is None:
        pytest.skip("for x86_64")
    (tmp_path / "outer.py").write_text(
        "import torch\nfrom tests.cpu.session.test_condensed import ROWS, Outer as model\n\n\n"
        "def inputs():\n    return (torch.linspace(-3, 3, ROWS),)\n"
    )
    built = cgcompile.build(str(tmp_path / "outer.py"), out=tmp_path / "outer.cgb", target="x86-64-v2,x86-64-v3")
    stored = safetensors_files.Mapped(str(built.path / file_names.SELF_TEST), file_names.SELF_TEST)
    assert {"-/output/0.hashes", "-/output/0.samples", "-/state/0.statistics"} <= stored.entries.keys()
    answer = self_test.fresh(str(built.path))
    assert answer["exit_code"] == 0 and answer["variant"] in built.variants, answer


def changed(bundle: Path, folder: Path, change: Callable[[dict[str, safetensors_files.Tensor]], None]) -> Path:
    """Returns a copy of the bundle with another self-test."""
    copy = shutil.copytree(bundle, folder / "changed.cgb")
    stored = safetensors_files.Mapped(str(bundle / file_names.SELF_TEST), file_names.SELF_TEST)
    tensors: dict[str, safetensors_files.Tensor] = {
        name: (row.dtype, row.shape, lambda name=name: bytes(stored.data(name))) for name, row in stored.entries.items()
    }
    change(tensors)
    with open(copy / file_names.SELF_TEST, "wb") as file:
        safetensors_files.write(file, tensors)
    manifest = archive.read_manifest(str(copy))
    seal(copy, replace(manifest, files=manifest_text.describe_files(str(copy))))
    return copy


def test_the_self_test_is_small_and_passes(bundle: Path) -> None:
    assert (bundle / file_names.SELF_TEST).stat().st_size < 32 << 20
    stored = safetensors_files.Mapped(str(bundle / file_names.SELF_TEST), file_names.SELF_TEST)
    assert {"-/output/0.samples", "-/state/0.statistics"} <= stored.entries.keys()
    assert "-/output/1" in stored.entries, "what is small enough stays whole"
    done = CliRunner().invoke(app, ["verify", str(bundle), "--run", "--json"])
    assert done.exit_code == 0, done.output
    answer = self_test.fresh(str(bundle))
    assert answer["exit_code"] == 0 and all(row["passed"] for row in answer["results"])


def test_a_wrong_expectation_is_named(bundle: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, safetensors_files.Tensor]) -> None:
        for name, part in (("-/output/0", ".samples"), ("-/state/0", ".statistics")):
            dtype, shape, contents = tensors[name + part]
            data = bytearray(contents())
            data[3] ^= 0x40  # the exponent of the first number as float32, a low bit as float64
            data[7] ^= 0x40  # the second number as float32; the exponent of the first as float64
            tensors[name + part] = (dtype, shape, lambda data=data: bytes(data))
            hashes = tensors[name + ".hashes"]
            tensors[name + ".hashes"] = (*hashes[:2], lambda size=len(bytes(hashes[2]())): bytes(size))

    answer: dict[str, Any] = self_test.fresh(str(changed(bundle, tmp_path, change)))
    (row,) = answer["results"]
    texts = [tensor["text"] for tensor in row["tensors"] if not tensor["passed"]]
    assert answer["exit_code"] == 1 and len(texts) == 2, json.dumps(answer)
    assert texts[0].startswith("sample ") and texts[1].startswith("block 0: its largest absolute value is ")


def test_parts_that_do_not_fit_are_refused(bundle: Path, tmp_path: Path) -> None:
    def shorter(tensors: dict[str, safetensors_files.Tensor]) -> None:
        dtype, (count,), contents = tensors["-/state/0.samples"]
        tensors["-/state/0.samples"] = (dtype, (count - 1,), lambda: bytes(contents())[:-4])

    answer = self_test.fresh(str(changed(bundle, tmp_path, shorter)))
    assert answer["code"] == "weights-invalid" and "its condensed form does not match 9011200 elements" in answer["error"]


def test_a_part_that_is_missing_is_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(cgcompile.BuildError, match=r"'-/output/0': a part of its condensed form is missing"):
        changed(bundle, tmp_path, lambda tensors: tensors.pop("-/output/0.hashes") and None)
