"""The fast path of repeated calls with the same layout: inputs of the GPU as they were recorded, and outputs in memory that stays.

Such a call is one guard of the library's, and a straight line of what is left to do.  Every microsecond of it is measured
(tests/bench/gpu/dispatch.py): names are bound ahead, and nothing is asked that cannot have changed.
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
"""Kinds of calls that are remembered; beyond that all are forgotten and made again as needed."""

LIKE = 8
"""Kinds of calls that are remembered of one shape: what the first input's shape does not tell apart is tried one by one."""

Replay = Callable[[list[int], Sequence[View]], list[Any]]
"""(addresses of the inputs, views among the inputs) -> outputs."""


Fresh = Callable[[], "tuple[Any, Sequence[int]] | None"]
"""Makes what copies of outputs go to: what a call gives, and the address of each, of as many bytes.  None where there is no such
memory."""


class Caller(NamedTuple):
    """What a backend needs to know of who makes fast calls of a program.

    `stream`: the current one of a device.  `counts`: the `number` of each is one more with every call.  `finish` gives the outputs
    of a replay in the order of a stream.  `fresh`: where a replay copies the outputs itself, a call gives what this makes.
    """

    stream: Callable[[int], int | None]
    counts: Sequence[Any]
    finish: Callable[[Any], Any]
    fresh: Fresh | None


class Known(NamedTuple):
    """A kind of call: `guard` tells it from others, and gives the addresses of the inputs for `replay`."""

    guard: Guard
    replay: Replay


class StaticOutput(NamedTuple):
    """An output that stays in place: what the signature says of it, the caller's tensor over the runtime's memory, and what counts
    the calls that overwrite it."""

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
        """The one for a call with these inputs, and what its guard gives."""
        shape = getattr(tensors[0], "shape", None) if tensors else None
        for known in self._by_shape.get(shape, ()):  # type: ignore[arg-type]
            passed = known.guard(tensors)
            if passed is not None:
                self.last = known
                return known, passed
        return None

    def add(self, tensors: Sequence[Any], known: Known) -> None:
        """For calls with inputs like these, which its guard passes again or not at all."""
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
    """Replays a program, by its number among those of all entries, and gives views or copies; None where the backend has no fast
    path for it.  `counts`: what counts its calls."""
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
    """Copies by the driver to what `fresh` makes, or by the library.  Kernels are not given the copies' addresses instead, as they
    are those of inputs: one may write behind an output's last byte (a padded product of which a part is the output), and no bundle
    says how far."""
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
    """Makes the tensors that outputs are copied to; None where the library is to copy one, which is not row-major or empty."""
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
    """The address and bytes of a tensor that is row-major; 0 where the library is to copy it."""
    address, shape, dtype, strides, _ = descriptor
    return (address, prod(shape) * DTYPES[dtype]) if strides is None else (0, 0)
