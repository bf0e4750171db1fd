"""Caches torch's analysis of Triton kernels in a graph, by the kernel and the types of its arguments.

To find the arguments that a kernel writes to, torch compiles the kernel with Triton's front end, three times for every launch.
Uncached, this is a sixth of the time to lower a GPT of 12 equal layers (torch 2.13).

Private interfaces (torch 2.11, 2.13): `torch._higher_order_ops.triton_kernel_wrap.generate_ttir`, which returns a module that is
only read, and the names of its parameters; `FakeTensor`, `torch._inductor.ir.TensorBox`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.ir import TensorBox
from torch._subclasses.fake_tensor import FakeTensor
from triton.runtime.autotuner import Autotuner

PLAIN = (bool, int, float, str, type(None), torch.dtype)
"""Types of arguments whose values are constants of the compiled kernel."""


@contextmanager
def analysed_once() -> Iterator[None]:
    """Inside, torch's analyses of kernels are cached."""
    generate, analyses = triton_kernel_wrap.generate_ttir, dict[Any, Any]()

    def cached(kernel: Any, kwargs: dict[str, Any], descriptors: Mapping[str, Any]) -> Any:
        key = None if descriptors else _key(kernel, kwargs)
        if key is None:
            return generate(kernel, kwargs, descriptors)
        if key not in analyses:
            analyses[key] = generate(kernel, kwargs, descriptors)
        module, names = analyses[key]
        return module, list(names)

    with mock.patch.object(triton_kernel_wrap, "generate_ttir", cached):
        yield


def _key(kernel: Any, arguments: Mapping[str, Any]) -> Any:
    """Returns the cache key of an analysis, or None if an argument's type is not known here."""
    if isinstance(kernel, Autotuner):  # torch analyses the first configuration
        kernel, arguments = kernel.fn, {**arguments, **(kernel.configs[0].kwargs if kernel.configs else {})}
    key_parts: list[Any] = [kernel]
    for name, value in sorted(arguments.items()):
        if isinstance(value, FakeTensor | TensorBox):
            key_parts.append((name, value.dtype))
        elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | sympy.Expr):
            key_parts.append((name, sympy.Expr))  # the analysis uses the same number for all symbolic values
        elif isinstance(value, PLAIN):
            key_parts.append((name, type(value), value))
        else:
            return None
    return tuple(key_parts)
