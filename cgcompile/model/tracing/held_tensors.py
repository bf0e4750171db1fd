"""Tensors of a model that are neither parameters nor buffers: in attributes of its modules, and in objects, lists and dicts there.

torch.export knows only parameters and buffers; any other tensor is a constant.  So during the build, a tensor that calls write to
becomes a buffer, and thus state.  An object may hold a tensor that is also a buffer (registered layers of a cache).  It holds the
traced tensor while the model is traced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..user_code import can_be_asked

DEEP, WIDE = 6, 256
"""Maximum depth and number of elements of the search in containers and objects."""

OWN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""torch's own attributes of a module."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Held:
    """A tensor at `key` of `holder`, which is the `__dict__` of a module or an object, a list or a dict.  `path` is the path from
    `module` to it, with dots."""

    module: torch.nn.Module
    path: str
    holder: Any
    key: Any
    tensor: torch.Tensor


def held_tensors(model: torch.nn.Module) -> tuple[Held, ...]:
    """Returns all places of tensors in attributes, and in objects, lists and dicts there, each place once."""
    seen: set[int] = set()
    slots: list[Held] = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name not in OWN and not name.endswith("_hooks"):
                slots += _within(module, name, vars(module), name, value, DEEP, seen)
    return tuple(slots)


def _within(module: torch.nn.Module, path: str, holder: Any, key: Any, value: Any, depth: int, seen: set[int]) -> Iterator[Held]:
    if not can_be_asked(value):
        return
    if isinstance(value, torch.Tensor):
        if type(value) is torch.Tensor and value.layout is torch.strided and holder is not None:
            yield Held(module=module, path=path, holder=holder, key=key, tensor=value)
        return
    if not depth or isinstance(value, torch.nn.Module | type | str) or id(value) in seen:
        return
    inner: Any = None
    if isinstance(value, list | tuple):
        items, inner = list(enumerate(value))[:WIDE], value if isinstance(value, list) else None
    elif isinstance(value, dict):
        items, inner = list(value.items())[:WIDE], value
    elif hasattr(value, "__dict__") and not callable(value):
        items, inner = list(vars(value).items())[:WIDE], vars(value)
    else:
        return
    seen.add(id(value))
    for name, item in items:
        yield from _within(module, f"{path}.{name}", inner, name, item, depth - 1, seen)


@contextmanager
def own_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Restores the buffers of modules at the end, and the attributes that became buffers."""
    before = [(module, dict(module._buffers), set(module._non_persistent_buffers_set)) for module in model.modules()]
    slots = held_tensors(model)
    numbers = [
        (vars(module), name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if type(value) in (int, float)
    ]
    try:
        yield
    finally:
        for module, buffers, names in before:
            if {name: id(tensor) for name, tensor in module._buffers.items()} != {name: id(old) for name, old in buffers.items()}:
                for name in buffers.keys() & vars(module).keys():
                    del vars(module)[name]
                module._buffers.clear()
                module._buffers.update(buffers)
                module._non_persistent_buffers_set.clear()
                module._non_persistent_buffers_set.update(names)
        for slot in slots:
            if slot.holder is vars(slot.module) and slot.key not in slot.holder:
                slot.holder[slot.key] = slot.tensor
        for attributes, name, value in numbers:
            attributes.setdefault(name, value)


def make_buffer(held: Held) -> None:
    """Converts a held tensor to a buffer of its module, with its path as name."""
    if held.holder is vars(held.module):
        del held.holder[held.key]  # the buffer replaces the attribute
    also_buffer(held)


def also_buffer(held: Held) -> str:
    """Registers a held tensor also as a buffer of its module.  Returns the buffer's name."""
    plain = re.sub(r"\W", "_", held.path)
    number, name = 0, plain
    while name in held.module._buffers or hasattr(held.module, name):
        number += 1
        name = f"{plain}_{number}"
    held.module.register_buffer(name, held.tensor, persistent=False)
    return name


def make_attribute(model: torch.nn.Module, name: str, value: Any) -> None:
    """Converts the buffer `name` (`module.attribute`) to a plain attribute."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    delattr(module, leaf)
    vars(module)[leaf] = value


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """A place in an object, `held`, with a tensor that is also the buffer `leaf` of the module `owner`."""

    held: Held
    owner: torch.nn.Module
    leaf: str


def held_buffers(model: torch.nn.Module) -> tuple[Shared, ...]:
    """Returns the places in objects that hold a buffer of the model."""
    owners = {id(tensor): (module, leaf) for module in model.modules() for leaf, tensor in module._buffers.items()}
    return tuple(
        [
            Shared(held=slot, owner=owners[id(slot.tensor)][0], leaf=owners[id(slot.tensor)][1])
            for slot in held_tensors(model)
            if id(slot.tensor) in owners
        ]
    )


@contextmanager
def current_buffers(model: torch.nn.Module, shared: Sequence[Shared], target_device: torch.device) -> Iterator[None]:
    """Puts the current buffers into the places `shared` inside this context: traced tensors while the model is traced.  Also
    replaces the CPU device by `target_device` in modules and in objects that hold buffers, because `model.to()` does not change
    attributes."""
    replaced: list[tuple[Any, Any, Any, Any]] = []

    def put_in(holder: Any, key: Any, value: Any) -> None:
        replaced.append((holder, key, value, holder[key]))
        holder[key] = value

    for share in shared:
        put_in(share.held.holder, share.held.key, share.owner._buffers[share.leaf])
    holders = [vars(module) for module in model.modules()] + [share.held.holder for share in shared]
    for holder in {id(holder): holder for holder in holders}.values():
        for key, value in list(holder.items()) if isinstance(holder, Mapping) else ():
            if isinstance(value, torch.device) and value.type == "cpu" != target_device.type:
                put_in(holder, key, target_device)
    try:
        yield
    finally:
        for holder, key, value, before in reversed(replaced):
            if holder[key] is value:  # otherwise the model assigned another value
                holder[key] = before
