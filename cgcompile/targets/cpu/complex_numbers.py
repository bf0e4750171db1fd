"""Decompositions of operators on complex numbers, for AOTInductor.

Inductor generates no kernels for complex numbers, but calls torch's operators.  Operators with an argument of type `Scalar` cannot
be called without Python (dispatch.py), so other operators replace them here.  Private interface (torch 2.11, 2.13):
`torch._inductor.compile_fx.select_decomp_table`, the decompositions with which Inductor traces a program again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.compile_fx as compile_fx
from torch import Tensor

from ...errors import BuildError

aten = torch.ops.aten

Number = bool | int | float | complex


@contextmanager
def complex_decompositions() -> Iterator[None]:
    """While active, makes Inductor use these decompositions too when it traces programs again.  Raises torch-unsupported."""
    plain = getattr(compile_fx, "select_decomp_table", None)
    if plain is None:
        raise BuildError(
            "torch-unsupported",
            f"torch {torch.__version__}: Inductor has no select_decomp_table; cgcompile was tested with 2.11 and 2.13",
        )

    def table() -> dict[Any, Callable[..., Any]]:
        inductor_table = plain()
        return {**inductor_table, **{op: _for_complex(function, inductor_table.get(op)) for op, function in DECOMPOSITIONS.items()}}

    with patch.object(compile_fx, "select_decomp_table", table):
        yield


def _for_complex(function: Callable[..., Any], plain: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns a decomposition that calls `function` if an argument is complex.  If none is, or if `function` returns
    NotImplemented, it calls `plain`, Inductor's decomposition."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        if _complex([*args, *kwargs.values()]) and (result := function(*args, **kwargs)) is not NotImplemented:
            return result
        return NotImplemented if plain is None else plain(*args, **kwargs)

    return decomposed


def _complex(values: Sequence[Any]) -> bool:
    return any(
        isinstance(value, complex)
        or (isinstance(value, torch.dtype) and value.is_complex)
        or (isinstance(value, Tensor) and value.is_complex())
        for value in values
    )


def full(size: Sequence[int], value: Number, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Tensor:
    part = (dtype or torch.complex64).to_real()
    parts = [torch.full(size, component, dtype=part, device=device) for component in (complex(value).real, complex(value).imag)]
    return torch.complex(*parts)


def scalar(value: Number, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    return full((), value, dtype=dtype)


def add(x: Tensor, y: Tensor | Number, *, alpha: Number = 1) -> Tensor:
    """Adds a complex number to a real tensor.  Inductor adds complex tensors: it first adds 0 to each, which calls this again."""
    return NotImplemented if isinstance(y, Tensor) or x.is_complex() else x + _tensor(y * alpha, x)


def mul(x: Tensor, y: Tensor | Number) -> Tensor:
    return NotImplemented if isinstance(y, Tensor) or x.is_complex() else multiply(x, y)


def sub(x: Tensor, y: Tensor, *, alpha: Number = 1) -> Tensor:
    return x + _scaled(-y if isinstance(y, Tensor | complex | float | int) else y, alpha)


def rsub(x: Tensor, y: Tensor, alpha: Number = 1) -> Tensor:
    return _scaled(-x, alpha) + y


def addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    return _scaled(x, beta) + _scaled(torch.mm(a, b), alpha)


def baddbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    return _scaled(x, beta) + _scaled(torch.bmm(a, b), alpha)


def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Number = 1) -> Tensor:
    return x + _scaled(a * b, value)


def addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Number = 1) -> Tensor:
    return x + _scaled(a / b, value)


def multiply(x: Tensor, value: Number) -> Tensor:
    return x * _tensor(value, x)


def power(x: Tensor, exponent: Number) -> Tensor:
    return torch.pow(x, _tensor(exponent, x))


def power_of_number(value: Number, x: Tensor) -> Tensor:
    return torch.pow(_tensor(value, x), x)


def equal(x: Tensor, value: Number) -> Tensor:
    return torch.eq(x, _tensor(value, x))


def unequal(x: Tensor, value: Number) -> Tensor:
    return torch.ne(x, _tensor(value, x))


def converted(x: Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    """Converts real and imaginary parts.  Inductor's code for a conversion needs Python if the source or the result is complex128,
    or if a tensor has no axes."""
    target_dtype = x.dtype if dtype is None else dtype
    parts = torch.view_as_real(x.resolve_conj()).unbind(-1) if x.is_complex() else (x, torch.zeros_like(x))
    if target_dtype is torch.bool:
        return (parts[0] != 0) | (parts[1] != 0)
    if not target_dtype.is_complex:
        return parts[0].to(target_dtype)
    real, imaginary = [part.to(target_dtype.to_real()) for part in parts]
    return torch.complex(real, imaginary)


def pad(x: Tensor, lengths: Sequence[int], value: Number = 0) -> Tensor:
    real, imag = torch.view_as_real(x.resolve_conj()).unbind(-1)
    number = complex(value)
    return torch.complex(aten.constant_pad_nd(real, lengths, number.real), aten.constant_pad_nd(imag, lengths, number.imag))


def flipped(x: Tensor, dims: Sequence[int]) -> Tensor:
    parts = torch.view_as_real(x.resolve_conj()).unbind(-1)
    return torch.complex(*[torch.flip(part, dims) for part in parts])


def variance(x: Tensor, dim: Sequence[int] | None = None, *, correction: Number | None = None, keepdim: bool = False) -> Tensor:
    parts = torch.view_as_real(x.resolve_conj()).unbind(-1)
    one, two = [torch.var(part, dim, correction=correction, keepdim=keepdim) for part in parts]
    return one + two


def _scaled(x: Any, factor: Number) -> Any:
    return x if factor == 1 else multiply(x, factor) if isinstance(x, Tensor) else x * factor


def _tensor(value: Number, like: Tensor) -> Tensor:
    """Returns a number as a complex tensor of no dimensions, with the dtype of PyTorch's result for `like` and the number.
    Inductor would use complex128 for the number, and so for the result if `like` has integers (torch 2.13)."""
    common = torch.result_type(like, value)
    return full((), value, dtype=common if common.is_complex else None)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.full.default: full,
    aten.scalar_tensor.default: scalar,
    aten.add.Tensor: add,
    aten.mul.Tensor: mul,
    aten.sub.Tensor: sub,
    aten.rsub.Tensor: rsub,
    aten.addmm.default: addmm,
    aten.baddbmm.default: baddbmm,
    aten.addcmul.default: addcmul,
    aten.addcdiv.default: addcdiv,
    aten.pow.Tensor_Scalar: power,
    aten.pow.Scalar: power_of_number,
    aten.mul.Scalar: multiply,
    aten.eq.Scalar: equal,
    aten.ne.Scalar: unequal,
    aten.constant_pad_nd.default: pad,
    aten._to_copy.default: converted,
    aten.var.correction: variance,
    aten.flip.default: flipped,
    aten._conj.default: lambda x: x.conj_physical(),  # a kernel would read the values of a lazy conjugate without conjugating them
}
"""Decompositions by operator, used if an argument is complex."""
