"""Operators of the user's that launch Triton kernels (`torch.library.triton_op`): replaced by what their function does, with the
launches of `wrap_triton`, of which Inductor makes launches of its own.

Private interfaces (torch 2.11, 2.13): `torch._library.triton.triton_ops_to_kernels`, `torch._library.custom_ops.OPDEFS`, and
`_torch_dispatch_fns` of what it lists.  There `triton_op` puts the function that decomposes an operator; torch calls it where a
graph is made functional in Python, and here functions are made functional in C++.
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
    """What `triton_op` was given for an operator, None for any other operator."""
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    definition = OPDEFS.get(operator.name())
    decompose = getattr(definition, "_torch_dispatch_fns", {}).get(FunctionalTensorMode)
    if decompose is None or operator.name() not in triton_ops_to_kernels:
        return None
    return lambda *args, **kwargs: decompose(nullcontext(), operator, (), args, kwargs)
