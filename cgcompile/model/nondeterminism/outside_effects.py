"""Finds what a call does outside of the model and its results: it prints, or changes global variables and attributes of classes.

A bundle runs no Python, so its calls do not do this.  A change that results depend on is refused by other checks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..side_effects import Obstacle
from .clock_reads import PRINT, Read
from .generators import WIDE, first_draw, user_methods

RULE = "outside-effect"

LIBRARIES = frozenset({"torch", "builtins", "abc", "typing"})
"""Packages whose classes have no attributes of the user."""

NUMBERS = (int, float, bool)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Variable:
    """A variable outside of the model.  `read` returns its value, or the size and the numbers of a container."""

    name: str
    read: Callable[[], Any]


def variables(model: torch.nn.Module, entry: str) -> tuple[Variable, ...]:
    """Returns the global variables of the files with the model's methods, and the attributes of its classes: numbers and
    containers."""
    scopes = {id(method.__globals__): ("the global variable ", method.__globals__) for method in user_methods(model, entry)}
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        if kind.__module__.partition(".")[0] not in LIBRARIES:
            scopes[id(kind)] = (f"the class attribute {kind.__name__}.", vars(kind))
    return tuple([variable for title, scope in scopes.values() for variable in _variables(title, scope)])


def changed(before: Sequence[Any], after: Sequence[Any], compared: Sequence[Variable]) -> tuple[Variable, ...]:
    """Returns the variables whose states differ."""
    return tuple([variable for variable, old, new in zip(compared, before, after, strict=True) if old != new])


def effects(entry: str, moved: Sequence[Variable], reads: Sequence[Read], call: Callable[[], object]) -> tuple[Obstacle, ...]:
    """Returns an obstacle for every changed variable, and one for prints.  `call` repeats the call, to find the lines."""
    obstacles = []
    for variable in moved:
        where, line = first_draw([variable], call)
        obstacles.append(Obstacle(rule=RULE, message=f"{entry}() changes {variable.name}", where=where, source=line))
    for read in [read for read in reads if read.function is PRINT][:1]:
        obstacles.append(Obstacle(rule=RULE, message=f"{entry}() prints", where=read.where, source=read.source))
    return tuple(obstacles)


def _variables(title: str, scope: Mapping[str, Any]) -> Iterator[Variable]:
    for name, value in list(scope.items()):
        if not name.startswith("__") and type(value) in (*NUMBERS, list, dict, set, deque):
            yield Variable(name=title + name, read=lambda name=name: _state(scope.get(name)))  # type: ignore[misc]


def _state(value: Any) -> Any:
    if type(value) in NUMBERS:
        return value
    if not isinstance(value, list | dict | set | deque):
        return None
    elements = list(value.values() if isinstance(value, dict) else value) if len(value) <= WIDE else []
    return len(value), tuple([element for element in elements if type(element) in NUMBERS])
