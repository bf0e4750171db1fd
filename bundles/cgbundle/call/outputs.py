"""The outputs of a replay, as tensors of the caller's library: copies of their own, or guarded views."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CallError
from ..format.schema import EntrySpec, TensorSpec, Value
from ..format.spans import dense, is_dense, span
from ..tensors.library import Library, Wrapper
from .plan import Part, Slices

if TYPE_CHECKING:
    from ..format.open_files import KeptFile
    from .aliasing import OutputAliases
    from .backend import Backend, Results

LARGE = 128 << 10
"""Outputs of at least this size are returned without a copy, if no replay writes to their memory again.  A smaller copy takes no
longer than this check, 1 us (two cores)."""

Call = tuple[Library, int | None, Any]
"""The caller's library, the device of its tensors, and the `stream` of the backend.  A plain tuple, because every call makes
one."""


class Epoch:
    """Counts the replays of a session, or of the entry named by `entry`.  `closed`: its memory will be freed, even during a
    replay."""

    __slots__ = ("closed", "entry", "number")

    def __init__(self, entry: str = "") -> None:
        self.number, self.closed, self.entry = 0, False, entry


class Session:
    """The memories and programs of a session, the count of its calls, and the bundle's self-test.  It is closed when its last
    owner goes."""

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
    """The sizes in memory of a program's outputs and inputs, in bytes; `large`: the outputs that may be returned without a copy."""

    outputs: Sequence[int]
    inputs: Sequence[int]
    large: Sequence[int]

    def apart(self, outputs: Sequence[int], inputs: Sequence[int]) -> list[int]:
        """The large outputs that do not overlap another output or an input at these addresses."""
        places = sorted(zip((*outputs, *inputs), (*self.outputs, *self.inputs), range(len(outputs) + len(inputs)), strict=True))
        alone, furthest = [], 0
        for row, (begin, size, index) in enumerate(places):
            end = begin + size
            if begin >= furthest and (row + 1 == len(places) or places[row + 1][0] >= end) and index in self.large:
                alone.append(index)
            furthest = max(furthest, end)
        return alone


class Outputs:
    """Runs programs for calls; `views`: returns guarded views, which the next replay overwrites.

    `aliases` is None for an entry whose outputs share no memory with anything; `epoch` counts the session's replays, `entry_epoch`
    those of the entry, None where none of its outputs is donated, and `epochs` has the one of each output.
    """

    __slots__ = ("_aliases", "_backend", "_extents", "_first", "_programs", "_specs", "_static", "_views", "_wrappers",
                 "entry_epoch", "epoch", "epochs")  # fmt: skip

    def __init__(
        self,
        entry: EntrySpec,
        session: Session,
        first: int,
        aliases: OutputAliases | None,
        donated: Collection[int],
        *,
        views: bool,
    ) -> None:
        """`first`: the number of the entry's first program among those of all entries; `donated`: its outputs that a later call may
        take where they lie."""
        self._backend, self._aliases, self._views, self._specs = session.backend, aliases, views, entry.outputs
        self._first, self._programs, self.epoch = first, entry.programs, session.epoch
        self.entry_epoch = counter = Epoch(entry.name) if donated else None
        self.epochs = [counter if counter and index in donated else self.epoch for index in range(len(entry.outputs))]
        self._static: dict[tuple[str, int], list[Any]] = {}  # by library and program, of outputs that stay in place
        self._wrappers: dict[tuple[str, int], list[Wrapper]] = {}  # likewise, of outputs that do not
        self._extents: dict[int, Extents] = {}  # by program

    def replay(self, call: Call, program: int, addresses: list[int], parts: Sequence[tuple[Slices, Slices]] | None) -> list[Any]:
        """Replays with inputs at `addresses`; `parts` are the valid slices of the outputs (None: all)."""
        library, views, aliases = call[0], self._views, self._aliases
        if aliases is None and parts is None and not views:
            return self._copied(call, program, addresses)
        values = self._wrapped(call, program, addresses)
        if aliases is not None:
            values = aliases.wrap(call, program, values, addresses)
            values, bare = aliases.share(library, call[1], program, values, parts)
            handed = self.guard(library, values) if views else values
            return [
                value if index in bare else other if views else library.copy(value)
                for index, (value, other) in enumerate(zip(values, handed, strict=True))
            ]
        if parts is not None:
            values = [value[taken] if taken else value for value, (taken, _) in zip(values, parts, strict=True)]
        return self.guard(library, values) if views else [library.copy(value) for value in values]

    def replay_into(self, whole: Sequence[Any], call: Call, part: Part, addresses: list[int]) -> None:
        """Replays a part of a call that was chunked, and copies its outputs to their places in the call's."""
        values = self._wrapped(call, part.program, addresses)
        if self._aliases is not None:
            values = self._aliases.wrap(call, part.program, values, addresses)
        for output, value, (taken, placed) in zip(whole, values, part.outputs, strict=True):
            output[placed] = value[taken]

    def static(self, library: Library, program: int) -> list[Any] | None:
        """The outputs of a program as the library's tensors at fixed addresses; None if the addresses change."""
        return self._static.get((library.name, program))

    def guard(self, library: Library, values: Sequence[Any]) -> list[Any]:
        """The values as views that belong to the latest replay."""
        rows = zip(self._specs, values, self.epochs, strict=True)
        return [View(spec, value, library, epoch, epoch.number) for spec, value, epoch in rows]

    def close(self) -> None:
        self._static.clear()

    def _copied(self, call: Call, program: int, addresses: list[int]) -> list[Any]:
        """Replays, and returns tensors that the caller owns: copies, or large outputs whose memory is not used otherwise."""
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
        """Replays, and returns the outputs as tensors of the caller's library over the runtime's memory."""
        library, device, stream = call
        return self._over(library, program, self._backend.run(self._first + program, addresses, device, stream))

    def _over(self, library: Library, program: int, results: Results) -> list[Any]:
        """The caller's tensors over the memory of a replay."""
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
                library.wrapper(value.dtype, value.shape, _strides(value)) for value in [row.values[index] for index in row.outputs]
            ]
        return wrappers


def _strides(value: Value) -> Sequence[int]:
    """The strides of a dense value as a row-major tensor has them, because an axis of one element may have any stride."""
    return dense(value.shape) if is_dense(value.shape, value.strides) else value.strides
