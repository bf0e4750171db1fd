"""The outputs of a replay, as tensors of the caller's library: copies, or guarded views."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CallError
from ..format.schema import DTYPES, EntrySpec, TensorSpec
from ..format.shapes import dense, is_dense, span
from ..tensors.library import Descriptor, Guard, Library, Wrapper
from .plan import Part, Slices

if TYPE_CHECKING:
    from ..process import KeptFile
    from .aliasing import OutputAliases
    from .backend import Backend, Results

LARGE = 128 << 10
"""Outputs from this size are returned without a copy if no replay writes to their memory again. Smaller copies take no longer than
this check, 1 us (two cores)."""

Call = tuple[Library, int | None, Any]
"""The caller's library, the device of its tensors, and the backend's `stream`: a plain tuple, because every call makes one."""


class Epoch:
    """Counts the replays of a session, or of entry `entry`. `closed`: its memory will be freed, even during a replay."""

    __slots__ = ("closed", "entry", "number")

    def __init__(self, entry: str = "") -> None:
        self.number, self.closed, self.entry = 0, False, entry


class Session:
    """The backend, call counter and self-test of a session; closed with its last owner."""

    __slots__ = ("__weakref__", "backend", "epoch", "self_test")

    def __init__(self, backend: Backend, self_test: KeptFile | None = None) -> None:
        self.backend, self.epoch, self.self_test = backend, Epoch(), self_test


class View:
    """An output of call number `call`, without a copy (`outputs="view"`).  `tensor` is a tensor of the caller's library over the
    runtime's memory.  `clone()` copies it.

    Shape and dtype may be read at any time.  Everything else raises stale-view after the next call of the session.  A donated
    output (`Manifest.donations`) is valid until its own entry is called again.  A view may be an input of a call.
    """

    __slots__ = ("_epoch", "_library", "_spec", "_value", "call")

    def __init__(self, spec: TensorSpec, value: Any, library: Library, epoch: Epoch, call: int) -> None:
        self._spec, self._value, self._library, self._epoch, self.call = spec, value, library, epoch, call

    @property
    def name(self) -> str:
        """The output's name in the signature."""
        return self._spec.name

    @property
    def dtype(self) -> str:
        """As the signature spells it: "float32"."""
        return self._spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this call's output."""
        return tuple(self._value.shape)

    @property
    def tensor(self) -> Any:
        """The output, valid until the next call."""
        epoch = self._epoch
        if epoch.number != self.call or epoch.closed:
            of = f" of {epoch.entry!r}" if epoch.entry else ""
            after = "the program was closed" if epoch.closed else f"call {epoch.number}{of}"
            raise CallError("stale-view", f"output {self.name!r} of call {self.call}{of} was read after {after}")
        return self._value

    def clone(self) -> Any:
        """A copy in the caller's library, which later calls do not change."""
        return self._library.copy(self.tensor)

    def part(self, slices: tuple[slice, ...]) -> View:
        """A view of a part of this view, valid as long as this view.  Raises stale-view."""
        return View(self._spec, self.tensor[slices], self._library, self._epoch, self.call)

    def __getitem__(self, index: Any) -> Any:
        """A part of the tensor, as in its library.  Raises stale-view."""
        return self.tensor[index]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"output {self.name!r} has no axes")
        return int(self.shape[0])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy

        value = self.tensor
        array = value.__array__() if hasattr(value, "__array__") else value
        return numpy.array(array, dtype) if copy else numpy.asarray(array, dtype)

    def __dlpack__(self, **options: Any) -> object:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.tensor.__dlpack_device__()
        return device

    def __repr__(self) -> str:
        return f"cgbundle.View({self.name!r}, {self.dtype}, {list(self.shape)}, call {self.call})"


class Extents(NamedTuple):
    """Sizes in bytes of a program's outputs and inputs; `large`: outputs that may be returned without a copy."""

    outputs: Sequence[int]
    inputs: Sequence[int]
    large: Sequence[int]

    def apart(self, outputs: Sequence[int], inputs: Sequence[int]) -> list[int]:
        places = sorted(zip((*outputs, *inputs), (*self.outputs, *self.inputs), range(len(outputs) + len(inputs)), strict=True))
        alone, furthest = [], 0
        for row, (begin, size, index) in enumerate(places):
            end = begin + size
            if begin >= furthest and (row + 1 == len(places) or places[row + 1][0] >= end) and index in self.large:
                alone.append(index)
            furthest = max(furthest, end)
        return alone


class Outputs:
    """Runs programs for calls. `views`: returns guarded views, which the next replay overwrites. `epoch` counts the session's
    replays, `entry_epoch` those of an entry with donated outputs (else None), `epochs` has the counter of each output."""

    __slots__ = ("_aliases", "_backend", "_extents", "_first", "_programs", "_specs", "_static", "_views", "_wrappers",
                 "entry_epoch", "epoch", "epochs")  # fmt: skip

    def __init__(
        self, entry: EntrySpec, session: Session, first: int, aliases: OutputAliases | None, donated: Collection[int], *,
        views: bool,
    ) -> None:  # fmt: skip
        """`first`: the number of the entry's first program among all; `donated`: outputs that a later call may read in place."""
        self._backend, self._aliases, self._views, self._specs = session.backend, aliases, views, entry.outputs
        self._first, self._programs, self.epoch = first, entry.programs, session.epoch
        self.entry_epoch = counter = Epoch(entry.name) if donated else None
        self.epochs = [counter if counter and index in donated else self.epoch for index in range(len(entry.outputs))]
        self._static: dict[tuple[str, int], list[Any]] = {}  # by library and program: outputs at fixed addresses
        self._wrappers: dict[tuple[str, int], list[Wrapper]] = {}  # likewise: outputs at other addresses
        self._extents: dict[int, Extents] = {}  # by program

    def replay(self, call: Call, program: int, addresses: list[int], parts: Sequence[tuple[Slices, Slices]] | None) -> list[Any]:
        """Replays with inputs at `addresses`; `parts`: the valid slices of the outputs (None: all)."""
        library, views, aliases = call[0], self._views, self._aliases
        if aliases is None and parts is None and not views:
            return self._copied(call, program, addresses)
        values = self._wrapped(call, program, addresses)
        if aliases is not None:
            values = aliases.wrap(call, program, values, addresses)
            values, bare = aliases.share(library, call[1], program, values, parts)
            returned = self.guard(library, values) if views else values
            return [
                value if index in bare else other if views else library.copy(value)
                for index, (value, other) in enumerate(zip(values, returned, strict=True))
            ]
        if parts is not None:
            values = [value[valid] if valid else value for value, (valid, _) in zip(values, parts, strict=True)]
        return self.guard(library, values) if views else [library.copy(value) for value in values]

    def replay_into(self, whole: Sequence[Any], call: Call, part: Part, addresses: list[int]) -> None:
        """Replays one chunk of a call, and copies its outputs into the call's, `whole`."""
        values = self._wrapped(call, part.program, addresses)
        if self._aliases is not None:
            values = self._aliases.wrap(call, part.program, values, addresses)
        for output, value, (valid, placed) in zip(whole, values, part.outputs, strict=True):
            output[placed] = value[valid]

    def static(self, library: Library, program: int) -> list[Any] | None:
        """The outputs of a program as the library's tensors at fixed addresses, or None."""
        return self._static.get((library.name, program))

    def guard(self, library: Library, values: Sequence[Any]) -> list[Any]:
        """The values as views of the latest replay."""
        rows = zip(self._specs, values, self.epochs, strict=True)
        return [View(spec, value, library, epoch, epoch.number) for spec, value, epoch in rows]

    def close(self) -> None:
        self._static.clear()

    def _copied(self, call: Call, program: int, addresses: list[int]) -> list[Any]:
        """Replays, and returns tensors that the caller owns: copies, or large outputs that overlap nothing else."""
        library, device, stream = call
        results, copy = self._backend.run(self._first + program, addresses, device, stream), library.copy
        if results.static:
            return [copy(value) for value in self._over(library, program, results)]
        extents = self._extents.get(program)
        if extents is None:
            row = self._programs[program]
            outputs, inputs = [[row.values[index] for index in indices] for indices in (row.outputs, row.inputs)]
            sizes = [span(value) for value in outputs]
            large = [at for at, value in enumerate(outputs) if sizes[at] >= LARGE and is_dense(value.shape, value.strides)]
            extents = self._extents[program] = Extents(sizes, [span(value) for value in inputs], large)
        alone = extents.apart(results.addresses, addresses) if extents.large else ()
        values = []
        for index, (wrap, address) in enumerate(zip(self._wrappers_of(library, program), results.addresses, strict=True)):
            owner = results.transfer_ownership(index) if index in alone else None
            values.append(copy(wrap(address, results)) if owner is None else wrap(address, owner))
        results.release()
        return values

    def _wrapped(self, call: Call, program: int, addresses: list[int]) -> list[Any]:
        library, device, stream = call
        return self._over(library, program, self._backend.run(self._first + program, addresses, device, stream))

    def _over(self, library: Library, program: int, results: Results) -> list[Any]:
        if not results.static:
            wrappers = self._wrappers_of(library, program)
            return [wrap(address, results) for wrap, address in zip(wrappers, results.addresses, strict=True)]
        values = self._static.get((library.name, program))
        if values is None:
            row = self._programs[program]
            values = self._static[library.name, program] = [
                library.wrap(address, value.dtype, value.shape, value.strides, results, results.device)
                for address, value in zip(results.addresses, [row.values[index] for index in row.outputs], strict=True)
            ]
        return values

    def _wrappers_of(self, library: Library, program: int) -> list[Wrapper]:
        wrappers = self._wrappers.get((library.name, program))
        if wrappers is None:
            row = self._programs[program]
            wrappers = self._wrappers[library.name, program] = [
                # row-major strides for a dense value: axes of one element may have any stride
                library.wrapper(
                    value.dtype, value.shape, dense(value.shape) if is_dense(value.shape, value.strides) else value.strides
                )
                for value in [row.values[index] for index in row.outputs]
            ]
        return wrappers


# --- the fast path -------------------------------------------------------------------------------------------------------


KEPT = 4096  # maximum number of cached kinds of calls; above it the cache is cleared
LIKE = 8  # maximum number of cached kinds with the same shape of the first input, tried in turn
Replay = Callable[[list[int], Sequence[View]], list[Any]]  # (addresses of the inputs, views among the inputs) -> outputs


Fresh = Callable[[], "tuple[Any, Sequence[int]] | None"]
"""Allocates the outputs of a call: (outputs, addresses), or None if the library copies as fast."""


class Caller(NamedTuple):
    """What a backend's fast path needs from its caller. `stream`: the current stream of a device. `counts`: counters whose `number`
    every call increments. `finish` returns the outputs of a replay on a stream. `fresh` allocates outputs that the replay copies
    to."""

    stream: Callable[[int], int | None]
    counts: Sequence[Any]
    finish: Callable[[Any], Any]
    fresh: Fresh | None


class Known(NamedTuple):
    """A kind of call: `guard` recognizes it, and returns the input addresses for `replay`."""

    guard: Guard
    replay: Replay


class StaticOutput(NamedTuple):
    spec: TensorSpec
    value: Any
    epoch: Epoch


class KnownCalls:
    """The kinds of calls that an entry knows. `last` is the most recently used one, which is checked first."""

    __slots__ = ("_by_shape", "_count", "last")

    def __init__(self) -> None:
        self._by_shape: dict[Sequence[int], list[Known]] = {}  # of the first input
        self._count = 0
        self.last: Known | None = None

    def __len__(self) -> int:
        return self._count

    def find(self, tensors: Sequence[Any]) -> tuple[Known, tuple[list[int], Any]] | None:
        shape = getattr(tensors[0], "shape", None) if tensors else None
        for known in self._by_shape.get(shape, ()):  # type: ignore[arg-type]
            passed = known.guard(tensors)
            if passed is not None:
                self.last = known
                return known, passed
        return None

    def add(self, tensors: Sequence[Any], known: Known) -> None:
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
    """A function that replays a program (numbered over all entries) and returns views or copies; or None. `counts`: counters that
    it increments."""
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
    """Copies outputs with the driver to tensors of `fresh`, or with the tensor library. Kernels do not write to the copies
    directly: a padded matrix product may write beyond the end of an output, and the bundle does not store how far."""
    copied, copy, values = backend.copy, library.copy, [value for _, value, _ in outputs]
    places = [_place(library.describe(value)) for value in values]

    def finish(stream: Any) -> list[Any]:
        allocated = None if fresh is None else fresh()
        if allocated is None:
            return [copy(value) for value in values]
        copies: list[Any] = allocated[0]
        for target, (address, size) in zip(allocated[1], places, strict=True):
            copied(target, address, size, stream)
        return copies

    return finish


def _fresh(library: Library, outputs: Sequence[StaticOutput]) -> Fresh | None:
    """A function that allocates tensors for copies; None if the library has to copy an empty or not row-major output."""
    values, empty_like = [value for _, value, _ in outputs], library.empty_like
    if not all(_place(library.describe(value))[1] for value in values):
        return None

    def fresh() -> tuple[list[Any], list[int]] | None:
        tensors, addresses = [], []
        for value in values:
            allocated = empty_like(value)
            if allocated is None:
                return None
            tensors.append(allocated[0])
            addresses.append(allocated[1])
        return tensors, addresses

    return fresh


def _place(descriptor: Descriptor) -> tuple[int, int]:
    """The address and bytes of a row-major tensor; 0 if the library has to copy it."""
    address, shape, dtype, strides, _ = descriptor
    return (address, prod(shape) * DTYPES[dtype]) if strides is None else (0, 0)
