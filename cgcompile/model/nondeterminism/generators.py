"""Random generators of Python and NumPy that a model can draw from: the two global ones, and generators in the model."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch

from ..source import written_method
from ..user_code import can_be_asked, is_user_file, line_of

DEEP, WIDE = 3, 256
"""Maximum depth and number of elements of the search in containers."""

LOWEST, HIGHEST = 0, 0x12DD9BB3
"""Words of a Mersenne Twister's state that it outputs as 0 and as 2**32 - 1: the ends of the range of a draw."""

FIRST = 256
"""Number of words that are set to LOWEST or HIGHEST.  The other words keep their values, because some draws repeat until they get
another number."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Generator:
    """A random generator, with functions that read and write its state.  `ends` returns, for a state, states whose next draws are
    at either end of their range, or () if unknown."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    ends: Callable[[Any], tuple[Any, ...]]


class Readable(Protocol):
    """What has a state."""

    @property
    def read(self) -> Callable[[], Any]:
        """Returns the function that reads the state."""


def generators(model: torch.nn.Module, entry: str) -> tuple[Generator, ...]:
    """Returns the global generators, and those in modules and in scopes of the user's methods.  Omits NumPy's if it is not
    imported."""
    global_generators = [Generator(name="Python's `random`", read=random.getstate, write=random.setstate, ends=_python_ends)]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        read = lambda: numpy.get_state(legacy=False)  # noqa: E731
        global_generators.append(Generator(name="`numpy.random`", read=read, write=numpy.set_state, ends=_numpy_ends))
    visible: dict[int, Any] = {}
    for value in _visible(model, entry):
        visible.setdefault(id(value), value)
    return (*global_generators, *[generator for value in visible.values() for generator in _generators_of(value, numpy)])


def states(rngs: Sequence[Readable]) -> tuple[Any, ...]:
    """Returns the states of all generators in a form that can be compared."""
    return tuple([_frozen(rng.read()) for rng in rngs])


@contextmanager
def put_back(rngs: Sequence[Generator]) -> Iterator[None]:
    """Restores the states of the generators at the end."""
    before = [rng.read() for rng in rngs]
    try:
        yield
    finally:
        for rng, state in zip(rngs, before, strict=True):
            rng.write(state)


def first_draw(rngs: Sequence[Readable], call: Callable[[], object]) -> tuple[str, str]:
    """Returns the user's (file:line, source line) that first changes the state of one of `rngs` in `call`, or ("", "")."""
    search = _Search(rngs)
    before = sys.gettrace()
    sys.settrace(search.step)
    try:
        call()
    finally:
        sys.settrace(before)
    return search.location


class _Search:
    """A trace function that compares the states of the generators at every line of the user's code."""

    def __init__(self, rngs: Sequence[Readable]) -> None:
        self._rngs = rngs
        self._states = states(rngs)
        self._at: tuple[str, int] | None = None
        self.location = ("", "")

    def step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.location[0]:
            return None
        if event == "call" and not is_user_file(frame.f_code.co_filename):
            return None
        if self._at is not None and states(self._rngs) != self._states:
            self.location = line_of(*self._at)
            return None
        at: FrameType | None = frame.f_back if event == "return" else frame
        while at is not None and not is_user_file(at.f_code.co_filename):
            at = at.f_back
        self._at = (at.f_code.co_filename, at.f_lineno) if at is not None else None
        return self.step


# --- search -------------------------------------------------------------------------------------------------------


def user_methods(model: torch.nn.Module, entry: str) -> list[Any]:
    """Returns the method `entry` of the model, and forward() of every module, if they are functions in the user's files."""
    methods = [inspect.unwrap(written_method(model, entry))]
    for kind in dict.fromkeys([type(module) for module in model.modules()]):
        forward = getattr(kind, "forward", None)
        if inspect.isfunction(forward):  # a scripted module's class has none
            methods.append(inspect.unwrap(forward))
    codes = [(method, getattr(method, "__code__", None)) for method in dict.fromkeys(methods)]
    return [method for method, code in codes if code is not None and is_user_file(code.co_filename)]


def _visible(model: torch.nn.Module, entry: str) -> Iterator[Any]:
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _within(value, DEEP)
    for method in user_methods(model, entry):
        yield from method.__globals__.values()
        yield from inspect.getclosurevars(method).nonlocals.values()


def _within(value: Any, depth: int) -> Iterator[Any]:
    if not can_be_asked(value):
        return
    yield value
    if depth and isinstance(value, list | tuple):
        for element in value[:WIDE]:
            yield from _within(element, depth - 1)
    elif depth and isinstance(value, dict):
        for element in list(value.values())[:WIDE]:
            yield from _within(element, depth - 1)


def _generators_of(value: Any, numpy: Any) -> Iterator[Generator]:
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        yield Generator(name="a `random.Random`", read=value.getstate, write=value.setstate, ends=_python_ends)
    elif numpy is not None and isinstance(value, numpy.RandomState):
        read = lambda: value.get_state(legacy=False)  # noqa: E731
        yield Generator(name="a `numpy.random.RandomState`", read=read, write=value.set_state, ends=_numpy_ends)
    elif numpy is not None and isinstance(value, numpy.Generator | numpy.BitGenerator):
        bits = value.bit_generator if isinstance(value, numpy.Generator) else value
        write = lambda state: setattr(bits, "state", state)  # noqa: E731
        yield Generator(name="a `numpy.random.Generator`", read=lambda: bits.state, write=write, ends=_numpy_ends)


# --- states -------------------------------------------------------------------------------------------------------


def _python_ends(state: Any) -> tuple[Any, ...]:
    version, words, _ = state
    return tuple([(version, (end,) * FIRST + words[FIRST:-1] + (0,), None) for end in (LOWEST, HIGHEST)])


def _numpy_ends(state: Any) -> tuple[Any, ...]:
    if state["bit_generator"] != "MT19937":
        return ()
    ends = []
    for end in (LOWEST, HIGHEST):
        words = state["state"]["key"].copy()
        words[:FIRST] = end
        ends.append({**state, "state": {"key": words, "pos": 0}, **({"has_gauss": 0, "gauss": 0.0} if "gauss" in state else {})})
    return tuple(ends)


def _frozen(state: Any) -> Any:
    if isinstance(state, dict):
        return tuple([(name, _frozen(value)) for name, value in state.items()])
    return state.tobytes() if hasattr(state, "tobytes") else state
