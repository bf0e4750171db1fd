"""Reads a kernel that Inductor wrote: the KernelVariant that Triton compiles, its launch grid and the order of its arguments.
Private interfaces (torch 2.11, 2.13): `_load_triton_kernel_from_source`, `CachingAutotuner._create_compile_meta` and
`_create_compile_options`, `CompileResult._get_arg_lists`, `GridExpr`, `get_constexprs`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._inductor.async_compile import _load_triton_kernel_from_source
from torch._inductor.runtime.triton_heuristics import CompileResult, GridExpr, get_constexprs

from ...errors import BuildError
from ..lowered import KernelVariant
from .fake_device import KernelSource

BLOCKS = re.compile(r"^    (BLOCK_M|BLOCK_N|BLOCK_K) : tl\.constexpr = (\d+)$", re.MULTILINE)

Configuration = tuple[int, int, int, int, int]
"""block_m, block_n, block_k, stages, warps of a template's kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrapperKernel:
    """A variant and how the wrapper calls it.  `parameters`: the arguments' names.  `grid`: the launch grid by the arguments that
    are numbers."""

    variant: KernelVariant
    parameters: tuple[str, ...]
    grid: Callable[[Mapping[str, int]], tuple[int, int, int]]


def load(source: KernelSource, selected: Mapping[Configuration, str]) -> WrapperKernel:
    """Reads a kernel of the wrapper, with Inductor's first configuration, so that nothing is measured.  `selected`: how the
    configurations of templates were chosen.  Raises lowering-broken."""
    tuner = _load_triton_kernel_from_source(source.name, source.text)
    config = tuner.configs[0]
    meta = tuner._create_compile_meta(config)
    options = tuner._create_compile_options(config, meta)
    names = list(tuner.fn.arg_names)
    call = CompileResult(None, config, meta, tuner.inductor_meta)._get_arg_lists(names, get_constexprs(tuner.fn))[1]
    signature = tuple([(name, meta["signature"][name]) for name in names if name in meta["signature"]])
    if len(signature) != len(names) or any(name not in dict(signature) for name in meta["constants"]):
        raise BuildError(
            "lowering-broken", f"kernel {source.name}: its signature {list(meta['signature'])} does not name its arguments {names}"
        )
    text = true_hints(exact_products(constant_factors(_functions(source.text, source.name))), names)
    variant = KernelVariant(
        name=source.name,
        source=text,
        signature=signature,
        constants=tuple([(name, meta["constants"][name]) for name in names if name in meta["constants"]]),
        divisible=_divisible(source.name, names, meta["configs"]),
        warps=options.pop("num_warps"),
        stages=options.pop("num_stages"),
        options=tuple(sorted(options.items())),
        selected_by=_selected_by(text, config, selected, len(tuner.configs)),
    )
    inductor_meta = tuner.inductor_meta

    def grid(numbers: Mapping[str, int]) -> tuple[int, int, int]:
        return GridExpr.from_meta(inductor_meta, config).eval_slow(dict(numbers))

    return WrapperKernel(variant=variant, parameters=tuple(call), grid=grid)


def exact_products(source: str) -> str:
    """Replaces `allow_tf32=ALLOW_TF32` of templates, so that a float32 product is three tf32 products, which are almost as exact.
    Without tf32, Triton does not use tensor cores and is several times slower."""
    return source.replace("allow_tf32=ALLOW_TF32", 'input_precision="tf32x3"')


def constant_factors(source: str) -> str:
    """Turns constant factors of a product into matrices.  torch 2.11 and 2.13 broadcast a vector, which Triton refuses."""
    if len(set(BLOCKS.findall(source))) != 3 or "tl.dot(" not in source:
        return source
    return source.replace("tl.full([1], ", "tl.full([1, 1], ")


def true_hints(source: str, arguments: Sequence[str]) -> str:
    """Restricts the contiguity hint of a template that computes a factor instead of loading it, because the hint may be false.  If
    the last block of rows wraps around to the first row, its rows are not contiguous.  This does not matter for a loaded factor.
    The computation of a factor may load the rows' indices as a vector, which would be misaligned (torch 2.11)."""
    for factor, rows in (("A", "M"), ("B", "N")):
        if f"arg_{factor}" not in arguments:
            source = source.replace(f"({rows} >= BLOCK_{rows} and K > 1)", f"({rows} % BLOCK_{rows} == 0 and K > 1)")
    return source


def _functions(text: str, name: str) -> str:
    """Returns the kernel's function without decorators, then the helpers of scans and reductions with decorators."""
    parts = re.split(r"^(?=@triton|@triton_heuristics|def )", text, flags=re.MULTILINE)
    kernel, helpers = "", []
    for previous, part in zip(["", *parts], parts, strict=False):
        definition = re.match(r"def (\w+)", part)
        if definition and definition[1] == name:
            kernel = part
        elif definition and previous.startswith("@triton.jit"):
            helpers.append("@triton.jit\n" + part.strip() + "\n")
    if not kernel:
        raise BuildError("lowering-broken", f"kernel {name}: Inductor's module defines no such function")
    return "\n\n".join([textwrap.dedent(kernel).strip() + "\n", *helpers])


def _divisible(name: str, names: list[str], configs: Any) -> tuple[str, ...]:
    divisible = []
    for (index,), attributes in configs[0].items():
        if attributes != [["tt.divisibility", 16]]:
            raise BuildError("lowering-broken", f"kernel {name}: argument {names[index]} has the attributes {attributes}")
        divisible.append(names[index])
    return tuple(divisible)


def _selected_by(text: str, config: Any, selected: Mapping[Configuration, str], count: int) -> str:
    blocks = dict(BLOCKS.findall(text))
    if len(blocks) == 3:
        sizes = int(blocks["BLOCK_M"]), int(blocks["BLOCK_N"]), int(blocks["BLOCK_K"])
        return selected.get((*sizes, config.num_stages, config.num_warps), "heuristic")
    return "only" if count == 1 else "heuristic"
