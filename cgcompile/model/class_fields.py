"""Splits instances of classes that hold tensors into fields, and rebuilds them.

Supported are dataclasses, outputs of Hugging Face models, caches of transformers, and classes registered with torch's pytrees.

Private interface: classes of `transformers.cache_utils` have their layers in `layers`, and tensors as attributes (transformers 5.17
and 5.23).  This module does not import transformers.
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
"""The module that defines the classes of caches and their layers.  Their subclasses are caches too."""

DERIVED = frozenset({"batch_size", "max_batch_size", "dtype", "device"})
"""Attributes of a cache layer that its tensors determine.  Of these, transformers reads only `device` once the layer has
tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """The fields of an instance: the name of its class, its kind, and the names and values of the fields.

    `kind` is `object` or `mapping` (see cgbundle.format.pytree), or `tuple` if the fields have no names.  `remake` returns a copy
    of the instance with other values.  `context` has (name, value) of other constant attributes.  `obstacle` says why `remake` does
    not support the instance, or is "".
    """

    name: str
    kind: str
    names: tuple[str, ...]
    values: tuple[Any, ...]
    remake: Callable[[Sequence[Any]], Any]
    context: tuple[Any, ...] = ()
    obstacle: str = ""


def fields_of(value: Any) -> Fields | None:
    """Returns the fields of an instance of a supported class, else None."""
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
    extra = sorted(getattr(value, "__dict__", {}).keys() - set(names))
    return Fields(
        name=type(value).__name__, kind="object", names=names, values=tuple([getattr(value, name, None) for name in names]),
        remake=lambda values: _with_attributes(value, names, values),
        obstacle=f"its attribute {extra[0]!r} is no field" if extra else "",
    )  # fmt: skip


def _output(value: Any) -> Fields:
    """Returns the fields of a ModelOutput of transformers or a BaseOutput of diffusers: an OrderedDict of the fields that are not
    None."""
    none_fields = [field.name for field in dataclasses.fields(value) if field.name not in value]
    names = (*value.keys(), *none_fields)

    def remake(values: Sequence[Any]) -> Any:
        items = dict(zip(names, values, strict=True))
        instance = type(value)(**{field.name: items[field.name] for field in dataclasses.fields(value)})
        for name in items.keys() - {field.name for field in dataclasses.fields(value)}:
            instance[name] = items[name]
        return instance

    values = (*value.values(), *[getattr(value, name, None) for name in none_fields])
    return Fields(name=type(value).__name__, kind="mapping", names=names, values=values, remake=remake)


def _cache(value: Any) -> Fields:
    """Returns the attributes with tensors of a cache or of one of its layers.  `remake` copies the other attributes."""
    attrs = {name: item for name, item in vars(value).items() if not name.startswith("_")}
    names = tuple([name for name, item in attrs.items() if name == "layers" or _holds_tensor(item)])
    counts = any(name.startswith("cumulative_length") and type(item) is int for name, item in attrs.items())
    obstacle = f"{type(value).__name__} counts its tokens in a number of Python, which a graph cannot change" if counts else ""

    def remake(values: Sequence[Any]) -> Any:
        instance = _with_attributes(value, names, values)
        if "device" in attrs and values and isinstance(values[0], torch.Tensor):
            instance.device = values[0].device  # the build may have moved the tensors
        return instance

    context = {name: item for name, item in attrs.items() if name not in DERIVED and isinstance(item, bool | int | float | str)}
    return Fields(
        name=type(value).__name__, kind="object", names=names, values=tuple([attrs[name] for name in names]), remake=remake,
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
    """Returns a copy with new values of some attributes.  Runs no code of the class, and supports frozen classes."""
    instance = copy.copy(value)
    for name, item in zip(names, values, strict=True):
        object.__setattr__(instance, name, item)
    return instance


def _registered(value: Any) -> Fields | None:
    """Returns the fields of a class of `register_pytree_node`.  The fields have names only if all children have different keys."""
    children, spec = pytree.tree_flatten(value, is_leaf=lambda subtree: subtree is not value)
    node = pytree.SUPPORTED_NODES[type(value)]
    keys = [key for key, _ in node.flatten_with_keys_fn(value)[0]] if node.flatten_with_keys_fn else []
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in keys]
    named = bool(names) and all(names) and len(set(names)) == len(names) and len(names) == len(children)
    context = node.flatten_fn(value)[1]
    if not children and not _only_names(context):
        return None  # a constant without readable content
    return Fields(
        name=type(value).__name__, kind="object" if named else "tuple",
        names=tuple(names if named else map(str, range(len(children)))), values=tuple(children),
        remake=lambda values: pytree.tree_unflatten(list(values), spec),
        obstacle="" if _only_names(context) else f"{type(value).__name__} keeps {context!r} beside its tensors",
    )  # fmt: skip


def _only_names(context: Any) -> bool:
    """Returns whether the context of a registered class has only names and types.  The runtime does not compare other contents."""
    if isinstance(context, tuple | list):
        return all(_only_names(item) for item in context)
    return context is None or isinstance(context, str | type)
