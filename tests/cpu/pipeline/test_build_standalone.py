"""CPU bundles that by default contain cgcompile's own functions instead of those of torch's libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import cgbundle
import cgcompile
from cgbundle.cpu.machine import processor_flags
from cgcompile.errors import BuildError
from cgcompile.pipeline import build as pipeline
from cgcompile.targets.cpu.products import VECTORS, suits
from cgcompile.targets.instruction_sets import LEVELS, X86_64
from cgcompile.targets.kernels import standalone
from tests.helpers.raising import raises

measured = pytest.mark.skipif(VECTORS not in processor_flags(), reason=f"functions of ours are linked where {VECTORS} is")


class Products(nn.Module):
    """Two entries; `sorted` calls a function that only torch's libraries have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))

    def sorted(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sort(self.first(x), dim=-1, stable=True)[0]


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 8),)


def checked(path: Path, model: nn.Module, error: float = 1e-5) -> bool:
    """Checks a bundle against `model`. Returns whether it contains functions of torch's libraries."""
    x = torch.randn(3, 8)
    with cgbundle.load(path) as program, torch.no_grad():
        torch.testing.assert_close(program(x), model(x), rtol=error, atol=error)
        return not program.manifest.target.torch


@measured
def test_products_are_brought_and_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "cache"))
    model = Products().eval()
    assert checked(cgcompile.build(model, inputs, sizes=[1, 4], out=tmp_path / "a.cgb", target="cpu").path, model)
    monkeypatch.setattr(standalone, "command", lambda compiler, target: ["false"])  # would fail if it ran
    wider = nn.Sequential(nn.Linear(8, 30), nn.LayerNorm(30)).eval()
    assert checked(cgcompile.build(wider, inputs, sizes=[4], out=tmp_path / "b.cgb", target="cpu").path, wider)


def test_with_no_standalone_they_are_torchs(tmp_path: Path) -> None:
    model = Products().eval()
    built = cgcompile.build(model, inputs, sizes=[4], out=tmp_path / "a.cgb", target="cpu", standalone=False)
    assert not checked(built.path, model) and dict(built.manifest.provenance.options)["standalone"] == "false"


def test_where_one_entry_needs_torchs_libraries_all_run_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "cache"))
    model = Products().eval()
    entries = {"forward": inputs, "sorted": inputs}
    texts: list[str] = []
    built = cgcompile.build(
        model, entries, sizes={"forward": [4], "sorted": [4]}, out=tmp_path / "a.cgb", target="cpu",
        progress=lambda event: texts.append(event.text),
    )  # fmt: skip
    assert sum(text.endswith("loading Inductor") for text in texts) == 2, "both are lowered once"
    assert not any(standalone.is_in(path.read_bytes()) for path in (built.path / "host").iterdir())
    assert not checked(built.path, model)
    with raises("not-standalone", match="which only torch's libraries have"):
        cgcompile.build(
            model, entries, sizes={"forward": [4], "sorted": [4]}, out=tmp_path / "b.cgb", target="cpu", standalone=True
        )


class Pictures(nn.Module):
    def __init__(self, kernel: int, stride: int, groups: int = 1) -> None:
        super().__init__()
        self.cut, self.out = nn.Conv2d(4, 8, kernel, stride, groups=groups), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cut(x).flatten(2).mean(-1))


@pytest.mark.parametrize(
    ("kernel", "stride", "standalone", "brought"),
    [pytest.param(4, 4, None, True, marks=measured), (3, 1, None, False), pytest.param(3, 1, True, True, marks=measured)],
    ids=["patches", "overlapping", "overlapping, asked for"],
)
def test_pictures_in_patches(kernel: int, stride: int, standalone: bool | None, brought: bool, tmp_path: Path) -> None:
    """oneDNN's convolutions of overlapping patches are as fast as cgcompile's: those are only replaced on request."""
    model, x = Pictures(kernel, stride).eval(), torch.randn(2, 4, 12, 12)
    sizes = {"batch": [2]}
    built = cgcompile.build(
        model,
        lambda batch: (torch.randn(batch, 4, 12, 12),),
        sizes=sizes,
        out=tmp_path / "a.cgb",
        target="cpu",
        standalone=standalone,
    )
    assert (not built.manifest.target.torch) == brought
    with cgbundle.load(built.path) as program, torch.no_grad():
        torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Pictures(3, 1, groups=2), r"aten\.conv2d with groups"),
        (nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 3, 2)), r"aten\.conv1d"),
        (nn.Sequential(nn.Flatten(), nn.Linear(576, 3)).bfloat16(), r"aten\.linear of bfloat16"),
    ],
)
def test_missing_functions_are_named_before_anything_is_compiled(model: nn.Module, said: str, tmp_path: Path) -> None:
    dtype = next(model.parameters()).dtype
    with raises("not-standalone", match=f"^the program has {said}, which only torch's libraries compute"):
        cgcompile.build(
            model.eval(), lambda: (torch.randn(1, 4, 12, 12, dtype=dtype),), out=tmp_path / "a.cgb", target="cpu", standalone=True
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products_of_other_numbers_are_not_tried(dtype: torch.dtype, tmp_path: Path) -> None:
    model, events = Products().eval().to(dtype), []

    def typed(batch: int) -> tuple[torch.Tensor]:
        return (torch.randn(batch, 8, dtype=dtype),)

    built = cgcompile.build(model, typed, sizes=[4], out=tmp_path / "a.cgb", target="cpu", progress=events.append)
    assert built.manifest.target.torch and [event.stage for event in events if event.state == "done"].count("lower") == 1


@measured
def test_a_proof_that_fails_is_tried_again_with_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, rounding may flip a comparison; torch's own products round like eager PyTorch."""
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "cache"))
    plain: Callable[..., object] = pipeline.replay

    def replay(folder: Path, manifest: cgbundle.Manifest, *rest: object) -> object:
        if not manifest.target.torch:
            raise BuildError("proof-failed", "differs")
        return plain(folder, manifest, *rest)

    monkeypatch.setattr(pipeline, "replay", replay)
    model, events = Products().eval(), []
    built = cgcompile.build(model, inputs, sizes=[4], out=tmp_path / "a.cgb", target="cpu", progress=events.append)
    assert not checked(built.path, model)
    done = [event.text for event in events if (event.stage, event.state) == ("verify", "done")]
    assert done[0].startswith("building again with torch's libraries, because: differs") and len(done) == 2
    lowered = [event.text for event in events if (event.stage, event.state) == ("lower", "done")]
    assert [text.endswith(", from the cache") for text in lowered] == [False, True], "nothing is lowered again"
    with raises("proof-failed"):
        cgcompile.build(model, inputs, sizes=[4], out=tmp_path / "b.cgb", target="cpu", standalone=True)
    assert not (tmp_path / "b.cgb").exists() and not list(tmp_path.glob(".b*"))


def test_only_where_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    program = torch.export.export(Products().eval(), inputs(2))
    levels = {level.name: level for level in LEVELS}
    monkeypatch.setattr("os.uname", lambda: type("Machine", (), {"machine": X86_64}))
    assert suits(program, levels["x86-64-v3"]) and not suits(program, levels["x86-64-v2"])
    monkeypatch.setattr("os.uname", lambda: type("Machine", (), {"machine": "aarch64"}))
    assert not suits(program, levels["armv8.2-a"])


@measured
def test_large_weights_are_not_kept_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cgbundle.cpu import backend

    model = Products().eval()
    built = cgcompile.build(model, inputs, sizes=[4], out=tmp_path / "a.cgb", target="cpu")
    weights = dict(built.manifest.memories)["weights"]
    for memory, fixed in ((4 * weights, True), (4 * weights - 1, False)):
        monkeypatch.setattr(backend, "memory_of_quota", lambda memory=memory: memory)
        with cgbundle.load(built.path) as program:
            assert program._backend._shared.fixed == fixed
        assert checked(built.path, model)
