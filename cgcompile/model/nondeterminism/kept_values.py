"""Finds values that a call of the model keeps for later calls outside of its buffers: attributes, class attributes and globals.

If the results of a new model differ from those of the exported program, these values show the cause.
"""

from __future__ import annotations

import hashlib
import linecache
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch

from ...errors import ModelError
from ...util.raw_bytes import raw
from ..flat_module import FlatModule, call_eager
from ..side_effects import SideEffects
from ..source import SEED
from ..tracing.attributes import DEEP, WIDE, assignment_place, own_attributes
from ..user_code import call_user, is_user_file, shown

CODE = (type, ModuleType, FunctionType, property, staticmethod, classmethod)
"""Types of members of a class or a module that hold no data."""

Digests = dict[str, str]
"""Digests of values, by the name of an attribute or a global."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Values that calls keep for the next calls.  `first` has digests of the values that the first calls set.  `again` has the
    names of those that the second calls changed too.  `read` has the names of those that a call may read before it assigns them.
    `places` has (file:line, source line) of assignments, by name."""

    first: Digests
    again: tuple[str, ...]
    read: frozenset[str]
    places: Mapping[str, tuple[str, str]]


def kept_values(calls: Sequence[tuple[FlatModule, Sequence[torch.Tensor]]]) -> Kept:
    """Calls the entries of a new model three times, and returns what it keeps.  A call that raises is ignored."""
    model = calls[0][0].model
    before = _digests(model)
    _call_all(calls)
    after = _digests(model)
    set_first = {name: value for name, value in after.items() if before.get(name) != value}
    _call_all(calls)
    again = tuple([name for name, value in _digests(model).items() if after.get(name) != value])
    watched = tuple([name for name in set_first if name in own_attributes(model)])
    effects: list[SideEffects] = []
    for flat, _ in calls:
        flat.assigned, flat.watch = watched, effects.append  # from here on, a call restores the attributes at its end
    _call_all(calls)
    read = (set_first.keys() - set(watched)).union(*[effect.early for effect in effects])
    places = {name: assignment_place(model, name) if name in watched else _place(name) for name in set_first}
    return Kept(first=set_first, again=again, read=frozenset(read), places=places)


def _call_all(calls: Sequence[tuple[FlatModule, Sequence[torch.Tensor]]]) -> None:
    for flat, tensors in calls:
        with suppress(ModelError):
            call_user(call_eager, f"{flat.entry}()", "model", flat, [tensor.clone() for tensor in tensors], SEED)


def _place(name: str) -> tuple[str, str]:
    """Returns (file:line, source line) of the last assignment in a function to a global or a class attribute.  `name` is
    `file.py:name` or `Class.attribute`."""
    file, _, leaf = name.rpartition(":")
    if not file:
        leaf = name.rpartition(".")[2]
        kind = name.rpartition(".")[0]
        file = next((home.__file__ or "" for home in list(sys.modules.values()) if _defines(home, kind)), "")
    pattern = re.compile(rf"\s+.*\b{re.escape(leaf)}\b\s*([-+*/|&@%]?=[^=]|\[|\.\w+\()")
    numbered = enumerate(linecache.getlines(file), 1)
    indented = [(number, line) for number, line in numbered if pattern.match(line)]
    assigning = [
        pair for pair in indented if re.search(rf"\b{re.escape(leaf)}\b(\[[^\]]*\])?\s*[-+*/|&@%]?=[^=]", pair[1])
    ] or indented
    # the definition of a class attribute comes before assignments in functions
    return next(((f"{shown(file)}:{number}", line.strip()) for number, line in assigning[-1:]), ("", ""))


def _defines(home: ModuleType, kind: str) -> bool:
    member = getattr(home, kind, None)
    return isinstance(member, type) and member.__module__ == home.__name__ and getattr(home, "__file__", None) is not None


def _digests(model: torch.nn.Module) -> Digests:
    """Returns digests of attributes of modules (`module.attribute`), of the user's classes (`Class.attribute`), and of globals
    (`file.py:name`)."""
    digests = {name: _digest(value) for name, value in own_attributes(model).items()}
    kinds = {kind: None for module in model.modules() for kind in type(module).__mro__ if _is_users(kind)}
    for kind in kinds:
        digests |= {f"{kind.__qualname__}.{name}": _digest(value) for name, value in vars(kind).items() if _is_data(name, value)}
        home = sys.modules[kind.__module__]
        digests |= {
            f"{shown(home.__file__ or '')}:{name}": _digest(value) for name, value in vars(home).items() if _is_data(name, value)
        }
    return digests


def _is_users(kind: type) -> bool:
    home = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return home is not None and is_user_file(home) and "site-packages" not in home


def _is_data(name: str, value: Any) -> bool:
    return not name.startswith("__") and not isinstance(value, CODE)


def _digest(value: Any) -> str:
    hasher = hashlib.sha256()
    _add(hasher, value, DEEP, set())
    return hasher.hexdigest()


def _add(hasher: Any, value: Any, depth: int, seen: set[int]) -> None:
    """Adds a value to a hash, with its parts down to depth `depth`.  Of an object without readable parts, adds only the class."""
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.layout is torch.strided and not value.is_meta:
            hasher.update(raw(value).cpu().numpy().tobytes())
        return
    hasher.update(type(value).__qualname__.encode())
    if isinstance(value, int | float | complex | str | bytes | None):
        hasher.update(repr(value).encode())
    if not depth or id(value) in seen or isinstance(value, torch.nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, list | tuple | set | frozenset):
        parts: list[Any] = list(value)
    elif isinstance(value, dict):
        parts = [part for pair in value.items() for part in pair]
    elif hasattr(value, "__dict__") and not callable(value):
        parts = [part for pair in vars(value).items() for part in pair]
    else:
        parts = [repr(value)] if type(value).__module__ in ("itertools", "collections", "numpy") else []
    hasher.update(str(len(parts)).encode())
    for part in parts[: 2 * WIDE]:
        _add(hasher, part, depth - 1, seen)
