"""Handles moves in the user's code: `.to(...)`, `.type_as(...)`, `.cpu()`, `.cuda()`, `.pin_memory()`.

Private interface (torch 2.11, 2.13): `torch._C._nn._parse_to`, which parses the arguments of `.to(...)`.
"""

from __future__ import annotations

from typing import Any

import torch

from .operations import operate
from .tensor_places import CPU, DEVICE, HOST, TensorPlaces, plain_device
from .tracing import called


def to(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Handles `x.to(...)` in all its forms, and `x.type_as(other)`."""
    tensor, *positional = args
    other = positional[0] if positional and isinstance(positional[0], torch.Tensor) else kwargs.pop("other", None)
    copy = bool(kwargs.pop("copy", positional[3] if len(positional) > 3 else False))
    if other is not None:
        place: str | None = HOST if places.place(other) == HOST else DEVICE
        dtype, layout = other.dtype, kwargs.get("memory_format")
    else:
        plain_args = [plain_device(value) for value in positional[:3]]
        named = {name: plain_device(value) for name, value in kwargs.items()}
        device, dtype, _, layout = torch._C._nn._parse_to(*plain_args, **named)
        place = places.named(device) if device is not None else None
        if place is None:
            return operate(places, func, args, kwargs | ({"copy": True} if copy and len(positional) < 4 else {}))
    return _move(places, tensor, str(place), dtype, layout, copy)


def cpu(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Handles `x.cpu()`."""
    return _move(places, args[0], places.named(CPU) or HOST, None, kwargs.get("memory_format"), False)


def cuda(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Handles `x.cuda()` and `x.cuda(device)`."""
    device = kwargs.get("device", args[1] if len(args) > 1 else None)
    if device is None:
        places.to_gpu()
    place = places.named(device) if device is not None else DEVICE
    return _move(places, args[0], place or DEVICE, None, kwargs.get("memory_format"), False)


def pin_memory(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Handles `x.pin_memory()`: records an obstacle and pins nothing."""
    places.saw("pinned-memory", "pin_memory() has no effect: a bundle allocates its own pinned memory")
    return args[0]


def _move(
    places: TensorPlaces,
    tensor: torch.Tensor,
    place: str,
    dtype: torch.dtype | None,
    layout: torch.memory_format | None,
    copy: bool,
) -> torch.Tensor:
    """Moves and converts a tensor.  A tensor that moves is converted on the device: after a copy to it, or before a copy to the
    host."""
    crosses = place == HOST and places.place(tensor) != HOST
    if not crosses:
        moved_tensor = places.moved(tensor, place)
        tensor, copy = moved_tensor, copy and moved_tensor is tensor
    side = places.place(tensor)
    options = {} if layout is None else {"memory_format": layout}
    if dtype is not None and dtype != tensor.dtype:
        tensor = places.noted(called(torch.Tensor.to, [tensor, dtype], options), side)
    elif copy and not crosses:
        tensor = places.noted(called(torch.Tensor.clone, [tensor], options), side)
    elif layout not in (None, torch.preserve_format):
        tensor = places.noted(called(torch.Tensor.contiguous, [tensor], options), side)
    return places.moved(tensor, place)
