"""Moves that the user's code asks for: `.to(...)`, `.type_as(...)`, `.cpu()`, `.cuda()`, `.pin_memory()`.

Private interface (torch 2.11, 2.13): `torch._C._nn._parse_to`, which reads the arguments of `.to(...)`.
"""

from __future__ import annotations

from typing import Any

import torch

from .operations import operate
from .tensor_places import CPU, DEVICE, HOST, TensorPlaces, plain_device
from .tracing import called


def to(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`x.to(...)` in all its forms, and `x.type_as(other)`."""
    tensor, *rest = args
    other = rest[0] if rest and isinstance(rest[0], torch.Tensor) else kwargs.pop("other", None)
    copy = bool(kwargs.pop("copy", rest[3] if len(rest) > 3 else False))
    if other is not None:
        place: str | None = HOST if places.place(other) == HOST else DEVICE
        dtype, layout = other.dtype, kwargs.get("memory_format")
    else:
        plain = [plain_device(value) for value in rest[:3]]
        named = {name: plain_device(value) for name, value in kwargs.items()}
        device, dtype, _, layout = torch._C._nn._parse_to(*plain, **named)
        place = places.named(device) if device is not None else None
        if place is None:
            return operate(places, func, args, kwargs | ({"copy": True} if copy and len(rest) < 4 else {}))
    return _move(places, tensor, str(place), dtype, layout, copy)


def cpu(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`x.cpu()`."""
    return _move(places, args[0], places.named(CPU) or HOST, None, kwargs.get("memory_format"), False)


def cuda(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`x.cuda()`, `x.cuda(device)`."""
    device = kwargs.get("device", args[1] if len(args) > 1 else None)
    if device is None:
        places.to_gpu()
    place = places.named(device) if device is not None else DEVICE
    return _move(places, args[0], place or DEVICE, None, kwargs.get("memory_format"), False)


def pin_memory(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`x.pin_memory()`: nothing is pinned, and an obstacle says so."""
    places.saw("pinned-memory", "pin_memory(): pinned memory of the user's is not used")
    return args[0]


def _move(
    places: TensorPlaces,
    tensor: torch.Tensor,
    place: str,
    dtype: torch.dtype | None,
    layout: torch.memory_format | None,
    copy: bool,
) -> torch.Tensor:
    """The device converts: what goes there is copied first, what comes from there is copied last."""
    crosses = place == HOST and places.place(tensor) != HOST
    if not crosses:
        there = places.moved(tensor, place)
        tensor, copy = there, copy and there is tensor
    side = places.place(tensor)
    form = {} if layout is None else {"memory_format": layout}
    if dtype is not None and dtype != tensor.dtype:
        tensor = places.noted(called(torch.Tensor.to, [tensor, dtype], form), side)
    elif copy and not crosses:
        tensor = places.noted(called(torch.Tensor.clone, [tensor], form), side)
    elif layout not in (None, torch.preserve_format):
        tensor = places.noted(called(torch.Tensor.contiguous, [tensor], form), side)
    return places.moved(tensor, place)
