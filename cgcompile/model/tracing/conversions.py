"""Modules that forward() converts, `self.linear = self.linear.to(x.dtype)`, where they are what is asked for already.

Under export weights are fake tensors, and `torch.nn.Module._apply`, private, which `.to()`, `.float()` and their like call, swaps
such with what it made of them: that fails although nothing would change.  Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch


@contextmanager
def needless_conversions_left_out() -> Iterator[None]:
    """Meanwhile a conversion that gives every tensor of a module its own dtype, device and shape does nothing."""
    convert = torch.nn.Module._apply

    def apply(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        tensors = chain(module.parameters(recurse), module.buffers(recurse))
        if all(_alike(tensor, change(tensor)) for tensor in tensors):
            return module
        return convert(module, change, recurse)

    torch.nn.Module._apply = apply
    try:
        yield
    finally:
        torch.nn.Module._apply = convert


def _alike(tensor: torch.Tensor, made: torch.Tensor) -> bool:
    same = made.shape == tensor.shape and made.stride() == tensor.stride()
    return same and made.dtype == tensor.dtype and made.device == tensor.device
