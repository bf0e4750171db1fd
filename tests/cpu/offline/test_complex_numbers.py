"""Complex numbers as pairs of real numbers: the program equals PyTorch and contains no complex tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cgcompile.errors import ModelError  # noqa: E402
from cgcompile.offline.decompose import fourier  # noqa: E402
from cgcompile.offline.decompose.complex_numbers import Pair, joined, run_on_pairs  # noqa: E402

aten = torch.ops.aten

LENGTHS = [1, 2, 5, 8, 127, 128, 130, 200, 1009, 1024, 4096]


@pytest.mark.parametrize("length", LENGTHS)
def test_transforms_are_those_of_pytorch(length: int) -> None:
    torch.manual_seed(0)
    x, z = torch.randn(3, length, 2), torch.randn(3, length, 2, dtype=torch.complex64)
    for normalization, forward in ((fourier.NONE, True), (fourier.BY_ROOT, True), (fourier.BY_SIZE, False)):
        close(fourier.to_complex(z.real, z.imag, [1], normalization, forward), aten._fft_c2c(z, [1], normalization, forward))
    for onesided in (True, False):
        spectrum = fourier.to_complex_halves(x, [2, 1], fourier.NONE, onesided)
        close(spectrum, aten._fft_r2c(x, [2, 1], fourier.NONE, onesided))
    half = z[:, : length // 2 + 1]  # the inverse ignores imaginary parts that no transform of real numbers has
    close(
        fourier.to_real(half.real, half.imag, [2, 1], fourier.BY_SIZE, length), aten._fft_c2r(half, [2, 1], fourier.BY_SIZE, length)
    )


def close(output: tuple[Tensor, Tensor] | Tensor, wanted: Tensor) -> None:
    actual = torch.complex(*output) if isinstance(output, tuple) else output
    assert actual.shape == wanted.shape
    assert (actual - wanted).abs().max() <= 3e-6 * wanted.abs().max()


def test_a_length_that_cannot_be_taken_apart_is_refused() -> None:
    with pytest.raises(ModelError, match="4099 elements") as caught:
        fourier.to_complex_halves(torch.zeros(4099), [0], fourier.NONE, True)
    assert caught.value.code == "operator-without-kernel"


CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "numbers": lambda z, x: (z * 2j + 1 - z / (0.5 + 1j)) * 3 - 2j * x,
    "real tensors": lambda z, x: z * x + x - z / x + (1j * x),
    "products": lambda z, x: (z @ z.mT) @ (x.to(torch.complex64)) + torch.einsum("ij,jk->ik", z, z) @ x.to(z.dtype),
    "division": lambda z, x: 1 / z + z / z.conj() + (x + 1j) / z,
    "parts": lambda z, x: z.real + z.imag + z.abs() + z.angle() + torch.view_as_real(z).sum(-1),
    "made of parts": lambda z, x: torch.complex(x, x * 2) + torch.polar(x, x) + torch.view_as_complex(torch.stack([x, -x], -1)),
    "exponentials": lambda z, x: z.exp() * torch.exp(1j * x),
    "views": lambda z, x: z.T.reshape(2, -1)[:, 1:].unsqueeze(0).flatten().flip(0)[None].expand(2, -1),
    "lists": lambda z, x: torch.cat([z, x], 1).chunk(2, 1)[1] + torch.stack([x, z]).unbind(0)[1],
    "choices": lambda z, x: torch.where(x > 0, z, 0) + torch.where(x > 0, 1j, z),
    "sums": lambda z, x: z.sum() + z.mean(0) + z.cumsum(1),
    "transforms": lambda z, x: torch.fft.ifft2(torch.fft.fft2(z, norm="ortho") * torch.fft.fft2(x)),
    "of real numbers": lambda z, x: torch.fft.irfft(torch.fft.rfft(x, n=6) * torch.fft.rfft(x, n=6).conj(), n=6),
    "a spectrogram": lambda z, x: torch.stft(x.repeat(1, 8), 8, 4, window=torch.hann_window(8), return_complex=True).abs().pow(2),
    "back to a signal": lambda z, x: (
        torch.istft(z[:3], 4, 2, window=x[0], length=7)
        + torch.istft(torch.stack([z, z]), 6, 2, 5, window=torch.hann_window(7)[1:6], normalized=True, onesided=True).sum()
    ),
    "a complex signal": lambda z, x: torch.istft(z, 4, 3, window=x[0], onesided=False, return_complex=True, center=False),
    "shifts": lambda z, x: torch.fft.fftshift(torch.fft.fftn(x)).real,
    "constants": lambda z, x: torch.zeros_like(z) + torch.full((4, 4), 2 + 1j) * z,
    "parts that are written": lambda z, x: written(z, x),
    "sums of products": lambda z, x: torch.addcmul(z, z, z.conj(), value=0.5) + torch.addcmul(z, x, z) + torch.addcmul(z, x, x),
    "rotations": lambda z, x: torch.view_as_real(torch.view_as_complex(x.reshape(4, 2, 2)) * z[:, :2]).flatten(1),
}
"""Functions of complex z and real x, (4, 4) each."""


def written(z: Tensor, x: Tensor) -> Tensor:
    """Writes parts of a tensor."""
    matrix = torch.zeros(4, 4, dtype=z.dtype)
    matrix[1:, :2] = z[1:, 2:] * 2j
    matrix[0] = x[0]
    matrix[:, 3] *= 1 + 1j
    matrix[2, 1:] += z[2, 1:]
    matrix[3].fill_(4j)
    x = x.clone()
    x[0] = z[1].real
    return matrix * z + x


@pytest.mark.parametrize("name", CASES)
def test_operations_on_pairs_are_those_of_pytorch(name: str) -> None:
    torch.manual_seed(1)
    z, x = torch.randn(4, 4, dtype=torch.complex64), torch.rand(4, 4) + 0.5
    program = torch.export.export(_Of(CASES[name]), (z, x), strict=False)
    values: dict[Any, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = Pair(z.real.clone(), z.imag.clone()) if not values else x
        elif node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: values[operand])
            values[node] = run_on_pairs(node.target, args, kwargs)
            assert not (isinstance(values[node], Tensor) and values[node].is_complex())
        elif node.op == "output":
            output = joined(values[node.args[0][0]])
    torch.testing.assert_close(output, CASES[name](z, x), rtol=1e-5, atol=1e-5)


def test_reciprocals_of_large_and_small_numbers() -> None:
    z = torch.tensor([3e25 - 4e25j, 2e-25 + 1e-25j, 5e20j])
    actual = run_on_pairs(aten.reciprocal.default, (Pair(z.real, z.imag),), {})
    torch.testing.assert_close(joined(actual), z.reciprocal(), rtol=1e-6, atol=0)


def test_an_operator_without_a_rule_is_named() -> None:
    with pytest.raises(ModelError, match=r"linalg_inv_ex of complex numbers") as caught:
        run_on_pairs(aten.linalg_inv.default, (Pair(torch.eye(2), torch.eye(2)),), {})
    assert caught.value.code == "operator-without-kernel"


class _Of(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, z: Tensor, x: Tensor) -> Any:
        """Calls the function."""
        return self.function(z, x)
