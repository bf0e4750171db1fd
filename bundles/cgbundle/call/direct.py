"""Calls like one before: inputs of the GPU as they were recorded, and outputs in memory that stays.

Such a call is one question to the library, whether the inputs are like those, and a straight line of what is left to do.  Every
microsecond of it is measured (tests/bench/gpu/dispatch.py): names are bound ahead, and nothing is asked that cannot have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..format.schema import DTYPES, TensorSpec
from ..session.locks import during
from ..tensors.library import Descriptor, Library, Likeness
from .views import Epoch, View

if TYPE_CHECKING:
    from ..session.backend import Backend, Caller, Fresh

KEPT = 4096
"""Kinds of calls that are remembered; beyond that all are forgotten and made again as needed."""

LIKE = 8
"""Kinds of calls that are remembered of one shape: what the first input's shape does not tell apart is asked one by one."""

Replay = Callable[[list[int], Sequence[View]], list[Any]]
"""(addresses of the inputs, views among the inputs) -> outputs."""


class Direct(NamedTuple):
    """`like` tells calls that `replay` serves from others, and gives the addresses of their inputs."""

    like: Likeness
    replay: Replay


class Output(NamedTuple):
    """An output that stays in place: what the signature says of it, the caller's tensor over the runtime's memory, and what counts
    the calls that overwrite it."""

    spec: TensorSpec
    value: Any
    epoch: Epoch


class DirectCalls:
    """The direct calls of an entry.  `last` is the one that was met last, which the next call is asked about first."""

    __slots__ = ("_by_shape", "_count", "last")

    def __init__(self) -> None:
        self._by_shape: dict[Sequence[int], list[Direct]] = {}  # of the first input
        self._count = 0
        self.last: Direct | None = None

    def __len__(self) -> int:
        return self._count

    def find(self, tensors: Sequence[Any]) -> tuple[Direct, tuple[list[int], Any]] | None:
        """The one for a call like these inputs, and what it says of them."""
        shape = getattr(tensors[0], "shape", None) if tensors else None
        for each in self._by_shape.get(shape, ()):  # type: ignore[arg-type]
            found = each.like(tensors)
            if found is not None:
                self.last = each
                return each, found
        return None

    def add(self, tensors: Sequence[Any], direct: Direct) -> None:
        """For calls like one of these inputs, which it knows again or not at all."""
        if direct.like(tensors) is None:
            return
        if self._count >= KEPT:
            self.clear()
        kept = self._by_shape.setdefault(tuple(getattr(tensors[0], "shape", ())), [])
        if len(kept) == LIKE:
            del kept[0]
            self._count -= 1
        kept.append(direct)
        self._count += 1
        self.last = direct

    def clear(self) -> None:
        self._by_shape.clear()
        self._count, self.last = 0, None


def replay(
    backend: Backend, library: Library, program: int, outputs: Sequence[Output], counts: Sequence[Epoch], *, views: bool
) -> Replay:
    """Replays a program, by its number among those of all entries, and gives views or copies.  `counts`: what counts its calls."""
    from ..session.backend import Caller  # no load needs it

    device = backend.device
    assert device is not None  # where the inputs of a direct call lie
    if views:
        caller = Caller(library.stream, counts, _viewing(library, outputs), None)
    else:
        fresh = _fresh(library, outputs)
        caller = Caller(library.stream, counts, _copying(backend, library, outputs, fresh), fresh)
    return backend.direct(program, caller) or _by_steps(backend, program, device, caller)


def _by_steps(backend: Backend, program: int, device: int, caller: Caller) -> Replay:
    def line(addresses: list[int], given: Sequence[View]) -> list[Any]:
        return during(backend, caller.stream(device), lambda stream: replayed(addresses, given, stream))

    def replayed(addresses: list[int], given: Sequence[View], stream: Any) -> list[Any]:
        for view in given:
            view.tensor  # noqa: B018  raises stale-view where another thread's call came between
        for count in caller.counts:
            count.number += 1  # from here on the outputs of the last replay may be overwritten
        backend.run(program, addresses, device, stream)
        outputs: list[Any] = caller.finish(stream)
        return outputs

    return line


def _viewing(library: Library, outputs: Sequence[Output]) -> Callable[[Any], list[Any]]:
    if len(outputs) == 1:
        ((spec, value, epoch),) = outputs
        return lambda stream: [View(spec, value, library, epoch, epoch.number)]
    return lambda stream: [View(spec, value, library, epoch, epoch.number) for spec, value, epoch in outputs]


def _copying(backend: Backend, library: Library, outputs: Sequence[Output], fresh: Fresh | None) -> Callable[[Any], list[Any]]:
    """Copies by the driver to what `fresh` makes, or by the library.  Kernels are not given the copies' addresses instead, as they
    are those of inputs: one may write behind an output's last byte (a padded product of which a part is the output), and no bundle
    says how far."""
    copied, copy, values = backend.copy, library.copy, [value for _, value, _ in outputs]
    places = [_place(library.describe(value)) for value in values]

    def finish(stream: Any) -> list[Any]:
        found = None if fresh is None else fresh()
        if found is None:
            return [copy(value) for value in values]
        made: list[Any] = found[0]
        for target, (address, size) in zip(found[1], places, strict=True):
            copied(target, address, size, stream)
        return made

    return finish


def _fresh(library: Library, outputs: Sequence[Output]) -> Fresh | None:
    """Makes the tensors that outputs are copied to; None where the library is to copy one, which is not row-major or empty."""
    values, empty_like = [value for _, value, _ in outputs], library.empty_like
    if not all(_place(library.describe(value))[1] for value in values):
        return None

    def fresh() -> tuple[list[Any], list[int]] | None:
        made, addresses = [], []
        for value in values:
            found = empty_like(value)
            if found is None:
                return None
            made.append(found[0])
            addresses.append(found[1])
        return made, addresses

    return fresh


def _place(found: Descriptor) -> tuple[int, int]:
    """The address and bytes of a tensor that is row-major; 0 where the library is to copy it."""
    address, shape, dtype, strides, _ = found
    return (address, prod(shape) * DTYPES[dtype]) if strides is None else (0, 0)
