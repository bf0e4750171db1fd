"""Convolutions in Triton equal eager PyTorch: their kernels mask the padding by indices, which LLVM and ptxas compute in 16
bits."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgcompile.util.tolerance import compare, tolerance  # noqa: E402


def test_the_padding_of_a_traced_convolution_is_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers are those of DPT that ptxas 12.8 miscompiled: an upsampling and the convolution after it
    (`offline/compile/packed_adds.py`)."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.ConvTranspose2d(16, 8, 4, stride=4), torch.nn.Conv2d(8, 16, 3, padding=1, bias=False))

    def images(batch: int) -> torch.Tensor:
        return torch.randn(batch, 16, 4, 4)

    path = cgcompile.build(
        model.eval(), images, sizes={"batch": (1, 2)}, out=tmp_path / "m.cgb", target="cuda", record="cross-compile", prove="none"
    ).path
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model.cuda()
    with cgbundle.load(path) as program, torch.no_grad():
        for batch in (1, 2):
            pixels = images(batch).cuda()
            comparison = compare(model(pixels), program(pixels))
            assert comparison.error <= tolerance(torch.float32), comparison.text
