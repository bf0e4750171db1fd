"""Implements libdevice functions and inline assembly, which Triton's interpreter lacks, with NumPy and torch.  Results are within a
few units in the last place of libdevice's.  Private interfaces, Triton 3.6 and 3.7: `triton.language.extra.libdevice` and
`triton.language.extra.cuda.libdevice` as modules whose functions can be replaced, the dtypes that the functions of the second
module accept, and the assembly texts that Inductor (2.11, 2.13) and `triton.language.extra.cuda.gdc` emit."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import cuda, libdevice

from .builder import Builder
from .values import Array, Handle, tensor_of

Function = Callable[..., Array]


def _torch(name: str) -> Function:
    """torch's function of that name. torch is imported when a kernel calls it."""

    def apply(*items: Array) -> Array:
        import torch

        output: Array = operator.attrgetter(name)(torch)(*(tensor_of(item) for item in items)).numpy()
        return output

    return apply


def _double(name: str) -> Function:
    """torch's function in float64; its float32 results are not accurate enough."""
    function = _torch(name)
    return lambda *items: function(*(item.astype(np.float64) for item in items))


def _power(base: Array, exponent: Array) -> Array:
    return np.power(base.astype(np.float64), exponent)


FLOATS: dict[str, Function] = {
    "abs": np.abs, "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan,
    "atan2": np.arctan2, "atanh": np.arctanh, "cbrt": np.cbrt, "ceil": np.ceil, "copysign": np.copysign, "cos": np.cos,
    "cosh": np.cosh, "cospi": lambda x: np.cos(np.pi * x.astype(np.float64)), "exp": np.exp, "exp10": lambda x: np.power(10.0, x),
    "exp2": np.exp2, "expm1": np.expm1, "floor": np.floor, "fmod": np.fmod, "hypot": np.hypot, "log": np.log, "log10": np.log10,
    "log1p": np.log1p, "log2": np.log2, "nearbyint": np.rint, "nextafter": np.nextafter, "pow": _power, "remainder": lambda x, y: (
        x - y * np.rint(x.astype(np.float64) / y)
    ), "rint": np.rint, "rsqrt": lambda x: 1 / np.sqrt(x.astype(np.float64)), "sin": np.sin, "sinh": np.sinh,
    "sinpi": lambda x: np.sin(np.pi * x.astype(np.float64)), "sqrt": np.sqrt, "tan": np.tan, "tanh": np.tanh, "trunc": np.trunc,
    "round": lambda x: np.copysign(np.floor(np.abs(x.astype(np.float64)) + 0.5), x),
    "fma": lambda x, y, z: x.astype(np.float64) * y + z, "fdim": lambda x, y: np.maximum(x - y, 0),
    "saturatef": lambda x: np.clip(x, 0, 1),
    "max": np.fmax, "min": np.fmin, "rcp_rn": np.reciprocal, "sqrt_rn": np.sqrt, "div_rn": np.divide, "mul_rn": np.multiply,
    "add_rn": np.add, "sub_rn": np.subtract, "fast_expf": np.exp, "fast_logf": np.log, "fast_log2f": np.log2,
    "fast_log10f": np.log10,
    "fast_sinf": np.sin, "fast_cosf": np.cos, "fast_tanf": np.tan, "fast_tanhf": np.tanh, "fast_powf": _power,
    "fast_dividef": np.divide, "fast_exp10f": lambda x: np.power(10.0, x),
    "erf": _torch("erf"), "erfc": _double("erfc"), "erfcx": _double("special.erfcx"), "erfinv": _double("erfinv"),
    "erfcinv": lambda x: _torch("erfinv")(1 - x.astype(np.float64)), "lgamma": _double("lgamma"),
    "normcdf": _double("special.ndtr"),
    "normcdfinv": _double("special.ndtri"), "cyl_bessel_i0": _double("special.i0"),
    "cyl_bessel_i1": _double("special.i1"),
    "j0": _double("special.bessel_j0"), "j1": _double("special.bessel_j1"),
    "y0": _double("special.bessel_y0"), "y1": _double("special.bessel_y1"),
}  # fmt: skip
"""Functions from floats to the same float type.  Some compute in float64, because float32 is not accurate enough."""


OTHERS: dict[str, tuple[Any, Function]] = {
    "isnan": (tl.int32, np.isnan), "isinf": (tl.int32, np.isinf), "finitef": (tl.int32, np.isfinite),
    "isfinited": (tl.int32, np.isfinite),
    "signbit": (tl.int32, np.signbit), "ilogb": (tl.int32, lambda x: np.frexp(x)[1] - 1),
    "llrint": (tl.int64, np.rint), "llround": (tl.int64, FLOATS["round"]),
}  # fmt: skip
"""Functions from floats to a fixed integer type."""

WITH_INTEGER: dict[str, Function] = {"ldexp": np.ldexp, "scalbn": np.ldexp, "pow": _power}
"""Functions of a float and an int32 that return the float's type.  `pow` is used if the exponent is int32."""

INTEGERS: dict[str, Function] = {"abs": np.abs, "max": np.maximum, "min": np.minimum}
"""Functions of integers that return the same type."""


@dataclass(frozen=True, slots=True)
class Assembly:
    results: tuple[Handle, ...]

    def get_result(self, position: int) -> Handle:
        """Called by Triton's front end."""
        return self.results[position]


ASSEMBLY: dict[str, Function] = {
    "fma.rn.f32 $0, $1, $2, $3;": FLOATS["fma"],
    "rcp.approx.ftz.f32 $0, $1;": np.reciprocal,
}
"""Inline assembly that Inductor emits for atan.  Each statement computes one element."""

ORDERING = ("griddepcontrol.wait;", "griddepcontrol.launch_dependents;", "{ .reg .pred first; ")
"""Assembly without effect here, because it only orders kernels or prefetches memory."""


def install(builder: Builder, semantic: Any) -> None:
    """Replaces libdevice's functions and the builder's inline assembly.  Call it once per process."""
    for module in (libdevice, cuda.libdevice):
        for name, member in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("_"):
                _replace(module, name, member, builder, semantic)
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda *_, **__: None
    builder.create_inline_asm = lambda *arguments: assembly(builder, *arguments)  # type: ignore[attr-defined]


def _replace(module: ModuleType, name: str, member: Any, builder: Builder, semantic: Any) -> None:
    def stand_in(*items: Any, **_: Any) -> Any:
        return call(builder, semantic, name, [semantic.to_tensor(item) for item in items])

    setattr(module, name, stand_in)


def call(builder: Builder, semantic: Any, name: str, items: list[Any]) -> Any:
    """Computes libdevice.`name` for tensors of one type: float32, float64, or integers for a few functions.  Broadcasts scalars.
    Raises function-not-interpretable."""
    kinds = [item.dtype for item in items]
    floating = kinds[0] in (tl.float32, tl.float64)
    if floating and name in WITH_INTEGER and kinds[1:] == [tl.int32]:
        result, function = kinds[0], WITH_INTEGER[name]
    elif floating and len(set(kinds)) == 1 and name in FLOATS:
        result, function = kinds[0], FLOATS[name]
    elif floating and len(set(kinds)) == 1 and name in OTHERS:
        result, function = OTHERS[name]
    elif kinds[0].is_int() and len(set(kinds)) == 1 and name in INTEGERS:
        result, function = kinds[0], INTEGERS[name]
    else:
        raise builder.refusal(f"libdevice.{name}({', '.join(map(str, kinds))})")
    widest = items[0]
    for item in items[1:]:
        _, widest = semantic.broadcast_impl_value(item, widest)
    data = [semantic.broadcast_impl_value(item, widest)[0].handle.data for item in items]
    shape = widest.type.with_element_ty(result) if widest.type.is_block() else result
    return tl.tensor(builder.value(function(*data), result), shape)


def assembly(
    builder: Builder, text: str, constraints: str, items: list[Handle], types: list[Any], pure: bool, pack: int
) -> Assembly:
    """Computes an inline assembly statement of ASSEMBLY or ORDERING.  Raises function-not-interpretable."""
    if text.startswith(ORDERING):
        return Assembly(tuple(builder.get_null_value(dtype) for dtype in types))
    if text not in ASSEMBLY or pack != 1 or [item.dtype for item in items] != [tl.float32] * len(items):
        raise builder.refusal(f"inline assembly {text!r}")
    return Assembly((builder.value(ASSEMBLY[text](*(item.data for item in items)), tl.float32),))
