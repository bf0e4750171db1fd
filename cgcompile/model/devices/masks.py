"""Converts masks of a traced call: uint8 to bool, and a mask of known value to indices.

Eager PyTorch accepts uint8 as a condition and a mask, torch.export does not.  The size of a selection by a known mask does not
depend on data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

CONDITIONS = {torch.where: 0, torch.Tensor.where: 1}
"""Functions with a condition, and its position among the arguments."""

INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})

SELECTING = frozenset({torch.masked_select, torch.Tensor.masked_select})

MASKED = CONDITIONS.keys() | INDEXING | SELECTING

Call = tuple[Any, list[Any], dict[str, Any]]

Positions = Callable[[torch.Tensor], list[torch.Tensor] | None]
"""Returns the indices of True in a mask of known value, one tensor per axis; None for any other mask."""


def _selected(x: torch.Tensor, mask: torch.Tensor, positions: Positions) -> tuple[Any, ...] | None:
    """Returns the index that selects the elements of `x` where a mask of known value is true, or None.  Supports a mask that has
    the size of `x` along adjacent axes, and size 1 along the others."""
    if not all(type(size) is int for size in mask.shape):
        return None  # its value is unknown, and comparing its sizes would make them constants
    leading = x.dim() - mask.dim()
    axes = [axis for axis, size in enumerate(mask.shape) if size != 1] or [*range(mask.dim())]
    if leading < 0 or not axes or len(axes) != axes[-1] - axes[0] + 1:
        return None
    if any(x.shape[leading + axis] != mask.shape[axis] for axis in axes):
        return None
    places = positions(mask)
    return None if places is None else (*[slice(None)] * (leading + axes[0]), *[places[axis] for axis in axes])


def _select(x: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
    return x[index].reshape(-1)


def with_masks(func: Any, args: list[Any], kwargs: dict[str, Any], positions: Positions, truth: Callable[[Any], Any]) -> Call:
    """Returns the call with its masks converted.  `truth` converts uint8 to bool."""

    def as_truth(value: Any) -> Any:
        return truth(value) if isinstance(value, torch.Tensor) and value.dtype is torch.uint8 else value

    if get_proxy_mode() is None:
        return func, args, kwargs
    if (condition_position := CONDITIONS.get(func)) is not None:
        args = [as_truth(part) if place == condition_position else part for place, part in enumerate(args)]
        return func, args, {name: as_truth(part) if name == "condition" else part for name, part in kwargs.items()}
    if func in SELECTING and not kwargs and (index := _selected(args[0], args[1], positions)) is not None:
        return _select, [args[0], index], {}
    if func not in INDEXING:
        return func, args, kwargs
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not any(isinstance(part, torch.Tensor) and part.dtype in (torch.uint8, torch.bool) for part in index):
        return func, args, kwargs
    indices: list[Any] = []
    for part in map(as_truth, index):
        known = func is torch.Tensor.__getitem__ and isinstance(part, torch.Tensor) and part.dtype is torch.bool and part.dim() > 0
        places = positions(part) if known else None
        indices += [part] if places is None else places
    return func, [args[0], tuple(indices) if isinstance(args[1], tuple) or len(indices) > 1 else indices[0], *args[2:]], kwargs
