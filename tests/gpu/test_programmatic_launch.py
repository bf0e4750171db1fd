"""Kernels that start before the previous one has ended (programmatic dependent launch) give the same results as kernels that run
one after the other."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs an sm_90 GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle.format import archive  # noqa: E402
from cgbundle.format.table import Table  # noqa: E402
from tests.bench.builds.loops import Loop, Step  # noqa: E402

LAYERS, WIDTH, TOKENS, CALLS = 3, 256, 48, 100


class Chain(torch.nn.Module):  # type: ignore[misc]
    """A chain of products, norms and sums, and a buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [64, 512, 96, 1024, 64]
        self.parts = torch.nn.ModuleList([
            torch.nn.Sequential(torch.nn.LayerNorm(a), torch.nn.Linear(a, b), torch.nn.GELU())
            for a, b in pairwise(sizes)
        ])  # fmt: skip
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        for part in self.parts:
            x = part(x).flip(-1)
        return x.cumsum(-1), x.sum() + self.calls


def decoder(kind: type) -> Callable[[], Any]:
    return lambda: kind(LAYERS, WIDTH, TOKENS, torch.bfloat16)


MODELS: dict[str, tuple[Callable[[], Any], Callable[..., Any], dict[str, tuple[int, ...]], Callable[[int], Any]]] = {
    "chain": (
        Chain, lambda batch: (torch.randn(batch, 64),), {"batch": (1, 8, 64)},
        lambda number: torch.randn((1, 8, 64)[number % 3], 64, device="cuda"),
    ),
    "loop": (decoder(Loop), lambda: (torch.tensor([17]),), {}, lambda number: torch.tensor([number], device="cuda")),
    "step": (decoder(Step), lambda: (torch.tensor([17]),), {}, lambda number: torch.tensor([number], device="cuda")),
}  # fmt: skip


def early_edges(path: Path) -> int:
    manifest = archive.read_manifest(str(path))
    tables = [Table(archive.read(str(path), file), file.path) for file in manifest.files if file.path.startswith("graphs/")]
    return sum(sum(table.edge_type) for table in tables)


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_whose_kernels_overlap_has_the_bits_of_one_launch_after_the_other(tmp_path: Path, name: str) -> None:
    make, inputs, sizes, call = MODELS[name]
    torch.manual_seed(0)
    path = cgcompile.build(
        make().eval(), inputs, sizes=sizes, out=tmp_path / "model.cgb", target="cuda", record="cross-compile", prove="none"
    ).path
    assert early_edges(path) > 10
    with cgbundle.load(path) as graph, cgbundle.load(path, mode="stream") as stream:
        for number in range(TOKENS if name == "step" else CALLS):
            tensors = call(number)
            together, apart = [program(tensors) for program in (graph, stream)]
            together, apart = [result if isinstance(result, tuple) else (result,) for result in (together, apart)]
            for one, other in zip(together, apart, strict=True):
                assert torch.equal(one, other), f"call {number}"
