"""Operators without a C function in AOTInductor run without Python and equal eager PyTorch, all in one compilation."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cgbundle.cpu import libtorch
from cgbundle.cpu.host_region import Layout, RegionOutputs
from cgbundle.format.schema import Weight
from cgcompile.model.pytree import dtype_name
from cgcompile.targets.cpu import complex_numbers, dispatch, layouts
from cgcompile.targets.cpu.aoti import compile_cpu
from cgcompile.targets.cpu.dispatch import fallbacks_through_dispatcher
from tests.helpers.raising import raises

Calls = tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...]

CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "fft": lambda x, z, m: torch.fft.irfft(torch.fft.rfft(x) * 0.5, n=8),
    "fft of two axes": lambda x, z, m: torch.fft.fftn(m, dim=(-2, -1), norm="ortho").real,
    "stft": lambda x, z, m: torch.stft(x.repeat(1, 4), 16, window=torch.hann_window(16), return_complex=True).abs(),
    "products": lambda x, z, m: z.mT @ z - z.conj().mT @ z,
    "a number": lambda x, z, m: (z - 1.5) * (2 - 1j) + torch.full_like(z, 0.25j),
    "a number and integers": lambda x, z, m: ((x * 4).long() * -1j + (2 - 1j)) / (1j - (x > 0) * 2j),
    "a number and float64": lambda x, z, m: x.double() * 1j + 2j,
    "powers": lambda x, z, m: (x.abs() + 1) ** 1j + (1 + 1j) ** x,
    "addmm": lambda x, z, m: torch.addmm(z.T @ z, z.T, z, beta=0.5, alpha=2),
    "pad": lambda x, z, m: F.pad(z, (1, 2), value=0.5),
    "mask": lambda x, z, m: z.masked_fill(z.real > 0, 0).sgn(),
    "compare": lambda x, z, m: (z == 1) | (z != z),
    "variance": lambda x, z, m: z.std(-1),
    "to complex128 and back": lambda x, z, m: (z.to(torch.complex128) * 2).to(torch.complex64),
    "one number to complex128": lambda x, z, m: x.sum().to(torch.complex128),
    "complex from the end": lambda x, z, m: torch.flip(z, [0, 1]),
    "complex to bool": lambda x, z, m: (z * (z.real > 0)).to(torch.bool),
    "einsum": lambda x, z, m: torch.einsum("bi,bj->ij", z, z.conj()).angle(),
    "solve": lambda x, z, m: torch.linalg.solve(m, x[:, :4]),
    "inverse": lambda x, z, m: torch.linalg.inv(m),
    "a tuple": lambda x, z, m: torch.linalg.svd(m, full_matrices=False)[1],
    "a text": lambda x, z, m: torch.linalg.qr(m, mode="r")[1].abs(),
    "determinant": lambda x, z, m: torch.linalg.slogdet(m)[1],
    "median": lambda x, z, m: x.median(-1).values + x.nanmedian(),
    "histogram": lambda x, z, m: torch.histogram(x, 5, range=(-2.0, 2.0))[0],
    "optional numbers": lambda x, z, m: F.interpolate(x[None, None], scale_factor=2, mode="bilinear", antialias=True),
    "rows": lambda x, z, m: torch.unique(x[:2].sign(), dim=0).sum(0),
}
"""Functions of x (4, 8), complex z (4, 6) and well-conditioned m (4, 4, 4)."""


SCALE = "a scale that is a weight of no dimensions"


class Many(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.25))

    def forward(self, x: Tensor, z: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        left, right = x.repeat(1, 2).to(torch.float8_e4m3fn), torch.eye(16).to(torch.float8_e4m3fn)
        product = torch._scaled_mm(left, right.t(), self.scale, self.scale, out_dtype=torch.float32)
        return *(function(x, z, m) for function in CALLS.values()), product


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the results of eager PyTorch and of the compiled code."""
    generator = torch.Generator().manual_seed(0)
    x, parts = torch.randn(4, 8, generator=generator), torch.randn(4, 6, 2, generator=generator)
    inputs = [x, torch.view_as_complex(parts), torch.randn(4, 4, 4, generator=generator) + 4 * torch.eye(4)]
    with torch.no_grad():
        model = Many()
        expected = model(*inputs)
        program = torch.export.export(model, tuple(inputs), strict=False)
    compiled = compile_cpu(program, tmp_path_factory.mktemp("many"), lambda text: None)
    library = libtorch.load(torch.__version__)
    scale = Weight(name="scale", tensor="scale", dtype="float32", shape=(), strides=(), memory="weights", offset=0)
    bound = layouts.bind_constants(compiled.path, program, [scale])
    input_layouts = [Layout(library.dtype(dtype_name(tensor.dtype)), tensor.shape, tensor.stride()) for tensor in inputs]
    outputs = RegionOutputs(library, len(expected))
    try:
        bound.region.run([tensor.data_ptr() for tensor in inputs], input_layouts, outputs.handles)
        actual = [_read(library, handle, like) for handle, like in zip(outputs.handles, expected, strict=True)]
    finally:
        bound.region.close()
    return dict(zip((*CALLS, SCALE), zip(expected, actual, strict=True), strict=True))


def _read(library: libtorch.LibTorch, handle: int | None, like: Tensor) -> Tensor:
    """Copies the tensor behind a handle."""
    dtype, shape, strides = library.layout(handle or 0)
    assert dtype == library.dtype(dtype_name(like.dtype))
    place = ctypes.c_void_p()
    library.data_pointer(ctypes.c_void_p(handle), ctypes.byref(place))
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_byte * (elements * like.element_size())).from_address(place.value or 0)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(shape, strides).clone()


@pytest.mark.parametrize("name", (*CALLS, SCALE))
def test_the_code_gives_what_eager_pytorch_does(name: str, results: dict[str, tuple[Tensor, Tensor]]) -> None:
    expected, actual = results[name]
    torch.testing.assert_close(actual, expected.resolve_conj(), rtol=1e-4, atol=1e-4)


class Scaled(nn.Module):
    """Calls an operator that takes a `Scalar` and that has no decomposition when cgcompile's is removed."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.sub(z, z, alpha=2)


def test_an_operator_that_the_c_interface_cannot_call_is_named_with_the_line(tmp_path: Path) -> None:
    program = torch.export.export(Scaled(), (torch.ones(3, dtype=torch.complex64),))
    with (
        patch.dict(complex_numbers.DECOMPOSITIONS, clear=True),
        raises("operator-without-code", match=r"test_dispatch\.py:\d+: aten::sub\.Tensor cannot run without Python"),
    ):
        compile_cpu(program, tmp_path, lambda text: None)


class Converted(nn.Module):
    """Calls an operator that torch implements only in Python."""

    def forward(self, z: Tensor) -> Tensor:
        converted: Tensor = torch.ops.prims.convert_element_type(z, torch.complex128)
        return converted


def test_an_operator_that_torch_implements_only_in_python_is_named_with_the_line(tmp_path: Path) -> None:
    program = torch.export.export(Converted(), (torch.ones(3, dtype=torch.complex64),))
    said = r"test_dispatch\.py:\d+: prims::convert_element_type cannot run without Python"
    with raises("operator-without-code", match=said):
        compile_cpu(program, tmp_path, lambda text: None)


def test_another_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PATCHED_METHODS", ((nn.Module, "no_such_method"),))
    with raises("torch-unsupported", match=r"Inductor has no Module\.no_such_method"), fallbacks_through_dispatcher():
        pass
    monkeypatch.delattr(complex_numbers.compile_fx, "select_decomp_table")
    with raises("torch-unsupported", match="Inductor has no select_decomp_table"), complex_numbers.complex_decompositions():
        pass
