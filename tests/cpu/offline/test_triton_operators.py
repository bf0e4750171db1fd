"""A user's operator with a Triton kernel, in a cross-compiled bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="traced bundles need Triton")
pytest.importorskip("torch")

import cgcompile
from cgcompile.offline.lower import jobs
from cgcompile.offline.trace import KERNELS

MODEL = """
import torch, triton, triton.language as tl
from torch.library import triton_op, wrap_triton

@triton.jit
def shifted(x, made, count, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(made + place, tl.load(x + place, place < count, 0.0) + SHIFT, place < count)

@triton_op("test_triton_operators::shift", mutates_args=())
def shift(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    wrap_triton(shifted)[(triton.cdiv(x.numel(), 16),)](x, made, x.numel(), SHIFT=3.0, BLOCK=16)
    return made

@shift.register_kernel("cpu")
def _(x):
    return x + 3.0

class Model(torch.nn.Module):
    def forward(self, x):
        return shift(x * 2) * 2

def model():
    return Model().eval()

def inputs(batch):
    return (torch.randn(batch, 5),)
"""


def test_its_kernel_is_in_the_bundle_and_nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a cache entry would be the exported program, which does not contain the kernel's source."""
    monkeypatch.setattr(jobs, "recall", None)
    monkeypatch.setattr(jobs, "remember", None)
    file = tmp_path / "shifting.py"
    file.write_text(MODEL)
    built = cgcompile.build(str(file), sizes=[4], out=tmp_path / "shifting.cgb", target="sm_90")
    assert [proof.method for proof in built.manifest.entries[0].self_test.proofs] == ["interpret"]
    assert "shifted" in {row["symbol"] for row in json.loads((tmp_path / "shifting.cgb" / KERNELS).read_text())}
