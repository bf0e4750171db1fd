"""Conversions of modules in forward() that change nothing, such as `self.linear = self.linear.to(x.dtype)`.

During the export, weights are fake tensors.  `.to()`, `.float()` and similar methods call the private `torch.nn.Module._apply`,
which swaps the tensors.  This fails for fake tensors, even if nothing would change.  Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch


@contextmanager
def needless_conversions_left_out() -> Iterator[None]:
    """Skips conversions that change no dtype, device or shape, inside this context.  `module.to(tensor)` uses the device that the
    user's code sees."""
    convert, move = torch.nn.Module._apply, torch.nn.Module.to

    def apply(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        tensors = chain(module.parameters(recurse), module.buffers(recurse))
        if all(_alike(tensor, change(tensor)) for tensor in tensors):
            return module
        return convert(module, change, recurse)

    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Handles `module.to(tensor)`: torch would read the tensor's real device, not the one that the user's code sees."""
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
