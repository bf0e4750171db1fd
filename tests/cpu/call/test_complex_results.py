"""Complex numbers of both widths, their conjugates, and complex weights and state in a bundle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import cgbundle
import cgcompile


class Waves(nn.Module):
    """Some outputs are views that torch conjugates or negates when they are read."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.complex128))

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        self.seen.add_(x.sum(0))
        y = torch.fft.fft(x @ self.mixing)
        wide = z.to(torch.complex128), y.to(torch.complex64), x.real.sum().to(torch.complex128)
        return y, y.conj(), (y * 2).conj().imag, z.conj(), z.mH, self.seen * 1j, *wide


@pytest.fixture(scope="module")
def model() -> Waves:
    torch.manual_seed(0)
    return Waves().eval()


@pytest.fixture(scope="module")
def bundle(model: Waves, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("waves") / "waves.cgb"
    return cgcompile.build(model, lambda batch: inputs(batch), sizes={"batch": (2, 4)}, out=out, target="cpu").path


def inputs(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 4, dtype=torch.complex128), torch.randn(batch, 3, dtype=torch.complex64)


def test_results_are_eager_pytorchs(model: Waves, bundle: Path) -> None:
    model.seen.zero_()
    with cgbundle.load(bundle, check="full") as program:
        for batch in (2, 4, 2):
            arguments = inputs(batch)
            with torch.no_grad():
                wanted = model(*arguments)
            for output, want in zip(program(*arguments), wanted, strict=True):
                torch.testing.assert_close(output, want.resolve_conj().resolve_neg())


def test_weights_and_results_are_kept_with_all_their_digits(model: Waves, bundle: Path) -> None:
    mixing = model.mixing.detach() * 3
    arguments = inputs(2)
    with cgbundle.load(bundle) as program:
        program.update({"mixing": mixing})
        output = program(*arguments)[0]
    torch.testing.assert_close(output, torch.fft.fft(arguments[0] @ mixing), rtol=1e-12, atol=1e-12)
