"""Replaces user operators that launch Triton kernels (`torch.library.triton_op`) by their functions.  Inductor compiles the kernels
that these functions launch by `wrap_triton`.

Private interfaces (torch 2.11, 2.13): `torch._library.triton.triton_ops_to_kernels`, `torch._library.custom_ops.OPDEFS`, and
`_torch_dispatch_fns` of its entries.  There, `triton_op` stores the function that decomposes an operator, which torch calls only
when it functionalizes in Python.  `retrace` functionalizes in C++.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.triton import triton_ops_to_kernels
from torch._subclasses.functional_tensor import FunctionalTensorMode


def launching(operator: Any) -> Callable[..., Any] | None:
    """The function of an operator that `triton_op` defined, or None for any other operator."""
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    definition = OPDEFS.get(operator.name())
    decompose = getattr(definition, "_torch_dispatch_fns", {}).get(FunctionalTensorMode)
    if decompose is None or operator.name() not in triton_ops_to_kernels:
        return None
    return lambda *args, **kwargs: decompose(nullcontext(), operator, (), args, kwargs)
