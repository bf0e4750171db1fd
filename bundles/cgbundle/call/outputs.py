"""The outputs of a replay, as tensors of the caller's library: copies of their own, or guarded views."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..format.schema import EntrySpec
from ..format.spans import span
from ..tensors.library import Library, Wrapper
from ..tensors.tensor import dense, is_dense
from .plan import Part, Slices
from .views import Epoch, View

if TYPE_CHECKING:
    from ..format.open_files import KeptFile
    from ..session.backend import Backend, Results
    from .output_aliases import OutputAliases

LARGE = 128 << 10
"""Bytes from which on a caller is given an output's own memory, where no replay writes there again.  A copy of less takes no longer
than the question whether that is so, 1 us (two cores)."""

Call = tuple[Library, int | None, Any]
"""The caller's library, the device that its tensors lie on, and what the backend's `locked` gave.  A plain tuple: every call makes
one."""


class Spans(NamedTuple):
    """Of a program's outputs and inputs the bytes from the first to the last; `large`: which outputs a caller may be given."""

    outputs: Sequence[int]
    inputs: Sequence[int]
    large: Sequence[int]

    def apart(self, outputs: Sequence[int], inputs: Sequence[int]) -> list[int]:
        """The large outputs that share no byte with another output, or with an input, which lie at these addresses."""
        places = sorted(zip((*outputs, *inputs), (*self.outputs, *self.inputs), range(len(outputs) + len(inputs)), strict=True))
        found, furthest = [], 0
        for row, (begin, size, index) in enumerate(places):
            end = begin + size
            alone = begin >= furthest and (row + 1 == len(places) or places[row + 1][0] >= end)
            if alone and index in self.large:
                found.append(index)
            furthest = max(furthest, end)
        return found


class Session:
    """What the entries of one session share: its memories and programs, the count of its calls, and the bundle's exam.  It is
    closed when the last who holds it goes."""

    __slots__ = ("__weakref__", "backend", "epoch", "exam")

    def __init__(self, backend: Backend, exam: KeptFile | None = None) -> None:
        self.backend, self.epoch, self.exam = backend, Epoch(), exam


class Outputs:
    """Runs programs for calls; `views`: what it hands out is guarded, and the next replay overwrites it.

    `aliases` is None for a bundle whose outputs share no memory with anything; `epoch` counts the session's replays.
    `own` those of the entry, None where none of its outputs is in a chain, and `epochs` has the one of each output.  `first` is the
    number of the entry's first program among those of all entries.
    """

    __slots__ = (
        "_aliases",
        "_backend",
        "_first",
        "_inputs",
        "_rows",
        "_spans",
        "_specs",
        "_static",
        "_views",
        "_wrappers",
        "epoch",
        "epochs",
        "own",
    )

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
        """`first`: the number of the entry's first program; `donated`: its outputs that a later call may take where they lie."""
        self._backend, self._aliases, self._views, self._specs = session.backend, aliases, views, entry.outputs
        self._first, self.epoch = first, session.epoch
        self.own = own = Epoch(entry.name) if donated else None
        self.epochs = [own if own and index in donated else self.epoch for index in range(len(entry.outputs))]
        self._rows = [tuple([program.values[index] for index in program.outputs]) for program in entry.programs]
        self._static: dict[tuple[str, int], list[Any]] = {}  # by library and program, of outputs that stay in place
        self._wrappers: dict[tuple[str, int], list[Wrapper]] = {}  # likewise, of outputs that do not
        self._spans: dict[int, Spans] = {}  # by program
        self._inputs = [[program.values[index] for index in program.inputs] for program in entry.programs]

    def replay(self, call: Call, program: int, addresses: list[int], parts: Sequence[tuple[Slices, Slices]] | None) -> list[Any]:
        """Replays on inputs at `addresses`; `parts` are the slices of the outputs that count (None: they count whole)."""
        library, views, aliases = call[0], self._views, self._aliases
        if aliases is None and parts is None and not views:
            return self._given(call, program, addresses)
        made = self._wrapped(call, program, addresses)
        if aliases is not None:
            made = aliases.wrap(call, program, made, addresses)
            made, bare = aliases.share(library, call[1], program, made, parts)
            if views:
                guarded = self.guard(library, made)
                return [value if index in bare else view for index, (value, view) in enumerate(zip(made, guarded, strict=True))]
            return [value if index in bare else library.copy(value) for index, value in enumerate(made)]
        if parts is not None:
            made = [value[taken] if taken else value for value, (taken, _) in zip(made, parts, strict=True)]
        return self.guard(library, made) if views else [library.copy(value) for value in made]

    def replay_into(self, whole: Sequence[Any], call: Call, part: Part, addresses: list[int]) -> None:
        """Replays a part of a call that was cut, and copies its outputs to their places in the call's."""
        made = self._wrapped(call, part.program, addresses)
        if self._aliases is not None:
            made = self._aliases.wrap(call, part.program, made, addresses)
        for output, value, (taken, placed) in zip(whole, made, part.outputs, strict=True):
            output[placed] = value[taken]

    def static(self, library: Library, program: int) -> list[Any] | None:
        """The outputs of a program that has run, as the library's tensors over memory that stays; None where it does not."""
        return self._static.get((library.name, program))

    def guard(self, library: Library, values: Sequence[Any]) -> list[Any]:
        """The values as views of the replay that was the last to begin."""
        rows = zip(self._specs, values, self.epochs, strict=True)
        return [View(spec, value, library, each, each.number) for spec, value, each in rows]

    def close(self) -> None:
        self._static.clear()

    def _given(self, call: Call, program: int, addresses: list[int]) -> list[Any]:
        """Replays, and gives tensors that are the caller's: copies, or large outputs in memory that nothing else uses."""
        library, device, stream = call
        results = self._backend.run(self._first + program, addresses, device, stream)
        copy = library.copy
        if results.static:
            return [copy(value) for value in self._over(library, program, results)]
        spans = self._spans.get(program) or self._spans_of(program)
        own = spans.apart(results.addresses, addresses) if spans.large else ()
        given = []
        for index, (wrap, address) in enumerate(zip(self._wrappers_of(library, program), results.addresses, strict=True)):
            owner = results.own(index) if index in own else None
            given.append(copy(wrap(address, results)) if owner is None else wrap(address, owner))
        results.release()
        return given

    def _wrapped(self, call: Call, program: int, addresses: list[int]) -> list[Any]:
        """Replays, and gives the outputs as the caller's tensors over the runtime's memory."""
        library, device, stream = call
        return self._over(library, program, self._backend.run(self._first + program, addresses, device, stream))

    def _over(self, library: Library, program: int, results: Results) -> list[Any]:
        """The caller's tensors over the memory of a replay."""
        if not results.static:
            return [
                wrap(address, results) for wrap, address in zip(self._wrappers_of(library, program), results.addresses, strict=True)
            ]
        key = (library.name, program)
        known = self._static.get(key)
        if known is None:
            known = self._static[key] = [
                library.wrap(address, row.dtype, row.shape, row.strides, results, results.device)
                for address, row in zip(results.addresses, self._rows[program], strict=True)
            ]
        return known

    def _wrappers_of(self, library: Library, program: int) -> list[Wrapper]:
        key = (library.name, program)
        wrappers = self._wrappers.get(key)
        if wrappers is None:
            wrappers = self._wrappers[key] = [
                library.wrapper(row.dtype, row.shape, dense(row.shape) if is_dense(row.shape, row.strides) else row.strides)
                for row in self._rows[program]
            ]
        return wrappers

    def _spans_of(self, program: int) -> Spans:
        rows = self._rows[program]
        outputs = [span(row) for row in rows]
        large = [place for place, row in enumerate(rows) if outputs[place] >= LARGE and is_dense(row.shape, row.strides)]
        made = self._spans[program] = Spans(outputs, [span(row) for row in self._inputs[program]], large)
        return made
