"""Moves the model to its device, one storage at a time.  Tensors that share memory still share it afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ...errors import BuildError
from ...util.raw_bytes import moved, seen_as, storage_bytes
from ..source import CPU, Source
from ..tracing.held_tensors import held_tensors
from ..user_code import can_be_asked, first_line

_Replaced = tuple[dict[str, Any], str, Any]
"""Parameters or buffers of a module, a name in it, and the original tensor."""

DEEP, WIDE = 6, 256
"""Maximum depth and number of elements of the search for tensors in attributes of modules."""

MOST = 20_000
"""Maximum number of objects of the search, which could reach most objects of the process."""


@contextmanager
def placed(source: Source, device: torch.device) -> Iterator[Source]:
    """Gives `source` with its model on `device`.  Moves one storage at a time, so the host never holds a second copy of the
    weights.  A model that was created for this build does not stay on the host.  A model of the caller is restored at the end: its
    tensors and the attributes of its modules.  Raises gpu-memory."""
    originals: list[tuple[torch.Tensor, torch.Tensor]] = []
    before = [] if source.owned else [(vars(module), dict(vars(module))) for module in source.model.modules()]
    replaced: list[_Replaced] = []
    try:
        if device != CPU:
            try:
                with torch.no_grad():
                    _replace_others(source.model, device, replaced)
                    for tensors in _by_storage(source.model, device):
                        originals += [] if source.owned else [(tensor, tensor.data) for tensor in tensors]
                        _move(tensors, device)
            except torch.OutOfMemoryError as error:
                raise BuildError("gpu-memory", f"{source.label}: {first_line(error)}") from error
        yield replace(source, device=device)
    finally:
        for tensor, data in originals:
            tensor.data = data
        for owner, name, value in () if source.owned else replaced:
            owner[name] = value
        for attributes, saved in before if device != CPU else ():
            attributes.clear()
            attributes.update(saved)


def _by_storage(model: torch.nn.Module, device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Yields the plain tensors on other devices, grouped by storage.  Keeps no reference to a group after the next is requested."""
    groups: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in _tensors(model):
        if _plain(tensor) and tensor.device != device:
            group = groups.setdefault(tensor.untyped_storage()._cdata, {})
            group[id(tensor)] = tensor
            if tensor._base is not None:  # the base of a view keeps the memory alive too
                group[id(tensor._base)] = tensor._base
    for key in list(groups):
        yield list(groups.pop(key).values())


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yields all tensors, also those in objects, containers and functions."""
    seen: set[int] = set()
    for module in model.modules():
        for value in list(vars(module).values()):
            yield from _within(value, DEEP, seen)
    for slot in held_tensors(model):
        yield slot.tensor


def _within(value: Any, depth: int, seen: set[int]) -> Iterator[torch.Tensor]:
    if not can_be_asked(value):
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and len(seen) < MOST and id(value) not in seen:
        seen.add(id(value))
        for part in _parts(value):
            yield from _within(part, depth - 1, seen)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, torch.nn.Module | type | ModuleType | str | bytes):
        return []
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()][:WIDE]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(islice(value, WIDE))
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    slots = [_slot(value, name) for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    return [*vars(value).values(), *slots][:WIDE] if hasattr(value, "__dict__") else slots[:WIDE]


def _slot(value: Any, name: str) -> Any:
    with suppress(Exception):  # a property of the user's class
        return getattr(value, name)
    return None


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout is torch.strided


def _move(tensors: list[torch.Tensor], device: torch.device) -> None:
    """Moves tensors of one storage.  The old memory is freed when the last tensor has moved."""
    if len(tensors) == 1:
        tensors[0].data = moved(tensors[0].data, device)
        return
    storage = storage_bytes(tensors[0]).to(device)
    for tensor in tensors:
        tensor.data = seen_as(storage, tensor)


def _replace_others(model: torch.nn.Module, device: torch.device, replaced: list[_Replaced]) -> None:
    """Replaces tensors that are not plain, for example quantized ones.  The method `.to()` of their class moves them."""
    others: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for owner in (module._parameters, module._buffers):
            for name, tensor in list(owner.items()):
                if tensor is None or _plain(tensor) or tensor.device == device:
                    continue
                if id(tensor) not in others:
                    moved_tensor = tensor.to(device)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    others[id(tensor)] = torch.nn.Parameter(moved_tensor, tensor.requires_grad) if is_parameter else moved_tensor
                replaced.append((owner, name, tensor))
                owner[name] = others[id(tensor)]
