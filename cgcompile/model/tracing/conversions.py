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
    """Meanwhile `module.to(tensor)` goes where the tensor is told to be.  A conversion that gives every tensor of a module its own
    dtype, device and shape does nothing."""
    convert, move = torch.nn.Module._apply, torch.nn.Module.to

    def apply(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        tensors = chain(module.parameters(recurse), module.buffers(recurse))
        if all(_alike(tensor, change(tensor)) for tensor in tensors):
            return module
        return convert(module, change, recurse)

    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """`module.to(tensor)`: torch reads the device from inside of a tensor, which is not where the user's code is told it is."""
        like = args[0] if args else kwargs.get("tensor")
        if not isinstance(like, torch.Tensor):
            return move(module, *args, **kwargs)
        return move(module, like.device, like.dtype)

    torch.nn.Module._apply, torch.nn.Module.to = apply, to
    try:
        yield
    finally:
        torch.nn.Module._apply, torch.nn.Module.to = convert, move


def _alike(tensor: torch.Tensor, converted: torch.Tensor) -> bool:
    same = converted.shape == tensor.shape and converted.stride() == tensor.stride()
    return same and converted.dtype == tensor.dtype and converted.device == tensor.device
