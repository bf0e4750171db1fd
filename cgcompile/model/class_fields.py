"""Instances of classes that hold tensors -> their fields, and back: dataclasses, outputs of Hugging Face's models, caches of
transformers, and what is registered with torch's pytrees.

Private interface: classes of `transformers.cache_utils` have their layers in `layers`, tensors as attributes (transformers 5.17 and
and 5.23).  Nothing is imported for it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

CACHES = "transformers.cache_utils"
"""The module whose classes are caches and layers of caches, and so are the classes that derive from them."""

DERIVED = frozenset({"batch_size", "max_batch_size", "dtype", "device"})
"""Attributes of a cache's layer that repeat what its tensors are: none but `device` is read once there are tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """What a bundle keeps of an instance: the name of its class, how it is read (`object` or `mapping`, see cgbundle.format.pytree;
    `tuple` for one whose fields have no names), and its fields.

    `remake` gives an instance like it with other values of the fields.  `context` is what it keeps of the instance besides.
    `obstacle` says why it cannot do so, or is "".
    """

    name: str
    kind: str
    names: tuple[str, ...]
    values: tuple[Any, ...]
    remake: Callable[[Sequence[Any]], Any]
    context: tuple[Any, ...] = ()
    obstacle: str = ""


def fields_of(value: Any) -> Fields | None:
    """The fields of an instance of such a class; None for anything else."""
    if isinstance(value, type | torch.nn.Module | torch.Tensor):
        return None
    if dataclasses.is_dataclass(value):
        return _output(value) if isinstance(value, OrderedDict) else _dataclass(value)
    if any(base.__module__ == CACHES for base in type(value).__mro__):
        return _cache(value)
    if type(value) in pytree.SUPPORTED_NODES and type(value).__module__ not in ("builtins", "collections"):
        return _registered(value)
    return None


def _dataclass(value: Any) -> Fields:
    names = tuple([field.name for field in dataclasses.fields(value)])
    more = sorted(getattr(value, "__dict__", {}).keys() - set(names))
    return Fields(
        name=type(value).__name__, kind="object", names=names, values=tuple([getattr(value, name, None) for name in names]),
        remake=lambda values: _with_attributes(value, names, values),
        obstacle=f"its attribute {more[0]!r} is no field" if more else "",
    )  # fmt: skip


def _output(value: Any) -> Fields:
    """A ModelOutput of transformers, a BaseOutput of diffusers: a dict of those fields of a dataclass that are not None."""
    rest = [field.name for field in dataclasses.fields(value) if field.name not in value]
    names = (*value.keys(), *rest)

    def remake(values: Sequence[Any]) -> Any:
        items = dict(zip(names, values, strict=True))
        instance = type(value)(**{field.name: items[field.name] for field in dataclasses.fields(value)})
        for name in items.keys() - {field.name for field in dataclasses.fields(value)}:
            instance[name] = items[name]
        return instance

    values = (*value.values(), *[getattr(value, name, None) for name in rest])
    return Fields(name=type(value).__name__, kind="mapping", names=names, values=values, remake=remake)


def _cache(value: Any) -> Fields:
    """A cache or one of its layers: the attributes that hold tensors.  All others stay as they are."""
    held = {name: item for name, item in vars(value).items() if not name.startswith("_")}
    names = tuple([name for name, item in held.items() if name == "layers" or _holds_tensor(item)])
    counts = any(name.startswith("cumulative_length") and type(item) is int for name, item in held.items())
    obstacle = f"{type(value).__name__} counts its tokens in a number of Python, which a graph cannot change" if counts else ""

    def remake(values: Sequence[Any]) -> Any:
        instance = _with_attributes(value, names, values)
        if "device" in held and values and isinstance(values[0], torch.Tensor):
            instance.device = values[0].device  # the build may have moved them
        return instance

    context = {name: item for name, item in held.items() if name not in DERIVED and isinstance(item, bool | int | float | str)}
    return Fields(
        name=type(value).__name__, kind="object", names=names, values=tuple([held[name] for name in names]), remake=remake,
        context=tuple(context.items()), obstacle=obstacle,
    )  # fmt: skip


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, tuple | list | dict):
        return any(_holds_tensor(item) for item in (value.values() if isinstance(value, dict) else value))
    fields = fields_of(value)
    return fields is not None and any(_holds_tensor(item) for item in fields.values)


def _with_attributes(value: Any, names: Sequence[str], values: Sequence[Any]) -> Any:
    """A copy with other attributes; nothing of the class runs, and it may be frozen."""
    instance = copy.copy(value)
    for name, item in zip(names, values, strict=True):
        object.__setattr__(instance, name, item)
    return instance


def _registered(value: Any) -> Fields | None:
    """A class of `register_pytree_node`: its children under their keys, or as a tuple where these are positions or unknown."""
    children, spec = pytree.tree_flatten(value, is_leaf=lambda subtree: subtree is not value)
    node = pytree.SUPPORTED_NODES[type(value)]
    keys = [key for key, _ in node.flatten_with_keys_fn(value)[0]] if node.flatten_with_keys_fn else []
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in keys]
    named = bool(names) and all(names) and len(set(names)) == len(names) and len(names) == len(children)
    context = node.flatten_fn(value)[1]
    if not children and not _names_alone(context):
        return None  # a constant: nobody could look into it
    return Fields(
        name=type(value).__name__, kind="object" if named else "tuple",
        names=tuple(names if named else map(str, range(len(children)))), values=tuple(children),
        remake=lambda values: pytree.tree_unflatten(list(values), spec),
        obstacle="" if _names_alone(context) else f"{type(value).__name__} keeps {context!r} beside its tensors",
    )  # fmt: skip


def _names_alone(context: Any) -> bool:
    """Whether what a registered class keeps beside its children is names at the most: the runtime can compare nothing else."""
    if isinstance(context, tuple | list):
        return all(_names_alone(item) for item in context)
    return context is None or isinstance(context, str | type)
