"""The fast path of repeated calls with the same layout: GPU inputs with the recorded layout, and outputs at fixed addresses.  Such
a call is one guard in the tensor library, then a fixed list of steps.  Every microsecond counts (tests/bench/gpu/dispatch.py):
names are bound in advance, and values that cannot change are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..format.schema import DTYPES, TensorSpec
from ..tensors.library import Descriptor, Guard, Library
from .outputs import Epoch, View

if TYPE_CHECKING:
    from .backend import Backend

KEPT = 4096
"""Maximum number of cached kinds of calls.  Above it the cache is cleared."""

LIKE = 8
"""Maximum number of cached kinds with the same shape of the first input.  These are tried one after the other."""

Replay = Callable[[list[int], Sequence[View]], list[Any]]
"""(addresses of the inputs, views among the inputs) -> outputs."""


Fresh = Callable[[], "tuple[Any, Sequence[int]] | None"]
"""Allocates the outputs of a call.  Returns them and their addresses, or None if there is not enough memory."""


class Caller(NamedTuple):
    """The caller of a program's fast path, as its backend sees it.  `stream` returns the current stream of a device.  `counts`:
    counters whose `number` every call increments.  `finish` returns the outputs of a replay, ordered on a stream.  `fresh`
    allocates the outputs, if the replay copies to them itself.
    """

    stream: Callable[[int], int | None]
    counts: Sequence[Any]
    finish: Callable[[Any], Any]
    fresh: Fresh | None


class Known(NamedTuple):
    """A kind of call: `guard` checks whether a call is of this kind, and returns the addresses of its inputs for `replay`."""

    guard: Guard
    replay: Replay


class StaticOutput(NamedTuple):
    """An output at a fixed address: its signature, the caller's tensor over the runtime's memory, and the counter of calls that
    overwrite it."""

    spec: TensorSpec
    value: Any
    epoch: Epoch


class KnownCalls:
    """The kinds of calls that an entry knows.  `last` is the most recently used one, which is checked first."""

    __slots__ = ("_by_shape", "_count", "last")

    def __init__(self) -> None:
        self._by_shape: dict[Sequence[int], list[Known]] = {}  # of the first input
        self._count = 0
        self.last: Known | None = None

    def __len__(self) -> int:
        return self._count

    def find(self, tensors: Sequence[Any]) -> tuple[Known, tuple[list[int], Any]] | None:
        """The kind of a call with these inputs, and the result of its guard."""
        shape = getattr(tensors[0], "shape", None) if tensors else None
        for known in self._by_shape.get(shape, ()):  # type: ignore[arg-type]
            passed = known.guard(tensors)
            if passed is not None:
                self.last = known
                return known, passed
        return None

    def add(self, tensors: Sequence[Any], known: Known) -> None:
        """Adds a kind for calls with inputs like these."""
        if known.guard(tensors) is None:
            return
        if self._count >= KEPT:
            self.clear()
        kept = self._by_shape.setdefault(tuple(getattr(tensors[0], "shape", ())), [])
        if len(kept) == LIKE:
            del kept[0]
            self._count -= 1
        kept.append(known)
        self._count += 1
        self.last = known

    def clear(self) -> None:
        self._by_shape.clear()
        self._count, self.last = 0, None


def replay(
    backend: Backend, library: Library, program: int, outputs: Sequence[StaticOutput], counts: Sequence[Epoch], *, views: bool
) -> Replay | None:
    """A function that replays a program, by its number among all entries, and returns views or copies; None if the backend has no
    fast path for it.  `counts`: the counters of its calls."""
    if views:
        caller = Caller(library.stream, counts, _viewing(library, outputs), None)
    else:
        fresh = _fresh(library, outputs)
        caller = Caller(library.stream, counts, _copying(backend, library, outputs, fresh), fresh)
    return backend.fast_path(program, caller)


def _viewing(library: Library, outputs: Sequence[StaticOutput]) -> Callable[[Any], list[Any]]:
    if len(outputs) == 1:
        ((spec, value, epoch),) = outputs
        return lambda stream: [View(spec, value, library, epoch, epoch.number)]
    return lambda stream: [View(spec, value, library, epoch, epoch.number) for spec, value, epoch in outputs]


def _copying(
    backend: Backend, library: Library, outputs: Sequence[StaticOutput], fresh: Fresh | None
) -> Callable[[Any], list[Any]]:
    """Copies outputs with the driver to tensors of `fresh`, or with the tensor library.  Kernels read inputs in place, but do not
    write to the copies directly: a kernel may write beyond the end of an output (a padded matrix product), and the bundle does not
    store how far."""
    copied, copy, values = backend.copy, library.copy, [value for _, value, _ in outputs]
    places = [_place(library.describe(value)) for value in values]

    def finish(stream: Any) -> list[Any]:
        room = None if fresh is None else fresh()
        if room is None:
            return [copy(value) for value in values]
        copies: list[Any] = room[0]
        for target, (address, size) in zip(room[1], places, strict=True):
            copied(target, address, size, stream)
        return copies

    return finish


def _fresh(library: Library, outputs: Sequence[StaticOutput]) -> Fresh | None:
    """A function that allocates the tensors for copies of outputs; None if the library has to copy an output that is empty or not
    row-major."""
    values, empty_like = [value for _, value, _ in outputs], library.empty_like
    if not all(_place(library.describe(value))[1] for value in values):
        return None

    def fresh() -> tuple[list[Any], list[int]] | None:
        tensors, addresses = [], []
        for value in values:
            room = empty_like(value)
            if room is None:
                return None
            tensors.append(room[0])
            addresses.append(room[1])
        return tensors, addresses

    return fresh


def _place(descriptor: Descriptor) -> tuple[int, int]:
    """The address and bytes of a row-major tensor; 0 if the library has to copy it."""
    address, shape, dtype, strides, _ = descriptor
    return (address, prod(shape) * DTYPES[dtype]) if strides is None else (0, 0)
