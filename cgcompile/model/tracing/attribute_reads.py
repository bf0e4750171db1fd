"""Finds whether a call reads an attribute of a module before it assigns it.

If every call assigns an attribute first, no later call sees its old value, and a replay does not need it.  During the call, three
methods of the module's class are replaced.  Every read of an attribute calls `__getattribute__` of the class, also `vars(module)`
and a copy of the module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..user_code import is_ours
from .attributes import holder_of

WHOLE = frozenset({"__dict__", "__getstate__", "__reduce_ex__", "__reduce__", "__deepcopy__", "__copy__"})
"""Attributes that give access to all other attributes."""

OWN_FILE = torch.nn.Module.__init__.__code__.co_filename
"""The file of `torch.nn.Module`, which reads `__dict__` only for parameters, buffers and modules."""

_MISSING = object()


class _Watched:
    """Records reads and assignments of the attributes `names` of a module in one call."""

    def __init__(self, prefix: str, names: Sequence[str], early: set[str]) -> None:
        self._prefix, self._names, self._early = prefix, frozenset(names), early
        self._assigned: set[str] = set()
        self.inside = False

    def read(self, name: str, file: str) -> None:
        """Records that code in `file` reads `name`."""
        if self.inside or (name == "__dict__" and (file == OWN_FILE or is_ours(file))):
            return
        for attribute in self._names if name in WHOLE else self._names & {name}:
            if attribute not in self._assigned:
                self._early.add(f"{self._prefix}.{attribute}" if self._prefix else attribute)

    def assigned(self, name: str) -> None:
        """Records that the call has assigned `name`."""
        self._assigned.add(name)


@contextmanager
def early_reads(model: torch.nn.Module, names: Sequence[str], early: set[str]) -> Iterator[None]:
    """Adds to `early` the attributes in `names` that the code inside this context reads before it assigns them.  Names are
    `module.attribute` or `module.object.attribute`.  Restores the attributes at the end."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        prefix, _, leaf = name.rpartition(".")
        grouped.setdefault(prefix, []).append(leaf)
    modules = {prefix: holder_of(model, prefix) for prefix in grouped}
    for prefix in [prefix for prefix, module in modules.items() if module is None]:  # the object does not exist: assume a read
        early.update(f"{prefix}.{leaf}" for leaf in grouped.pop(prefix))
        del modules[prefix]
    watched = {id(modules[prefix]): _Watched(prefix, leaves, early) for prefix, leaves in grouped.items()}
    before = [
        (vars(modules[prefix]), leaf, vars(modules[prefix]).get(leaf, _MISSING)) for prefix in grouped for leaf in grouped[prefix]
    ]
    kinds = list(dict.fromkeys(type(module) for module in modules.values()))
    methods = [
        (kind, name, vars(kind).get(name, _MISSING))
        for kind in kinds
        for name in ("__getattribute__", "__setattr__", "__delattr__")
    ]
    for kind in kinds:
        _watch(kind, watched)
    try:
        yield
    finally:
        for kind, name, method in methods:
            _put_back(kind, name, method)
        for attributes, leaf, value in before:
            attributes.pop(leaf, None)
            if value is not _MISSING:
                attributes[leaf] = value


def _watch(kind: Any, watched: dict[int, _Watched]) -> None:
    """Replaces the three methods of a class that access attributes of its instances."""
    get, set_attribute, remove = kind.__getattribute__, kind.__setattr__, kind.__delattr__

    def __getattribute__(self: Any, name: str) -> Any:
        if (watcher := watched.get(id(self))) is not None:
            watcher.read(name, sys._getframe(1).f_code.co_filename)
        return get(self, name)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        watcher = watched.get(id(self))
        if watcher is None or watcher.inside:
            set_attribute(self, name, value)
            return
        watcher.inside = True
        try:
            set_attribute(self, name, value)
        finally:
            watcher.inside = False
        watcher.assigned(name)

    def __delattr__(self: Any, name: str) -> None:
        if (watcher := watched.get(id(self))) is not None:
            watcher.read(name, "")
        remove(self, name)

    kind.__getattribute__, kind.__setattr__, kind.__delattr__ = __getattribute__, __setattr__, __delattr__


def _put_back(kind: Any, name: str, method: Any) -> None:
    if method is _MISSING:
        delattr(kind, name)
    else:
        setattr(kind, name, method)
