"""A loaded bundle some of whose outputs share memory with an input, a weight, state or another output, as in eager PyTorch.

Of every such output the program's values say where it lies beside what it shares memory with, at the recorded sizes.  A call that
is padded shares what still fits: whole inputs, live weights and state, outputs with each other; of one that is cut, the parts have
been put together in tensors of their own, and only whole inputs are the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import CallError
from ..format.schema import DTYPES, Alias, Manifest, Value
from ..format.schema import Program as Row
from ..format.spans import span
from ..program import Backend, _Run
from ..tensors.interface import Library
from ..validate.state import base_of
from ..validate.steps import PERSISTENT
from .plan import Slices
from .written_inputs import WritingProgram

INPUTS, OUTPUTS = "inputs", "outputs"


class Look(NamedTuple):
    """How an output (`value`) lies beside what it shares memory with (`base`) at one int_key: `offset` in bytes from its first
    element.  `whole`: it is all of it, laid out alike."""

    value: Value
    base: Value
    offset: int
    whole: bool


def look(manifest: Manifest, program: Row, alias: Alias) -> Look:
    """The look of an alias at the recorded sizes of a program."""
    value = program.values[program.outputs[alias.output]]
    base = base_of(manifest, program, alias)
    offset = value.offset - (base.offset if manifest.target.kind == "cuda" else 0)
    alike = (base.dtype, base.shape) == (value.dtype, value.shape)
    whole = offset == 0 and alike and _steps(value.shape, base.strides) == _steps(value.shape, value.strides)
    return Look(value, base, offset, whole)


def along(seen: Look, steps: Sequence[int]) -> tuple[int, list[int]] | None:
    """Where a look at an input lies in the caller's own tensor, whose axes lie `steps` bytes apart: bytes from its first element,
    and from one element of the look to the next along every axis.

    None where that tensor has no such look: an axis of the look runs over several axes of the input (as that of a flattened one
    does), which only lie so in the recorded layout, or the dtypes differ, and the tensor is laid out otherwise.
    """
    base, value = seen.base, seen.value
    item = DTYPES[base.dtype]
    if _steps(base.shape, [stride * item for stride in base.strides]) == _steps(base.shape, steps):
        return seen.offset, [stride * DTYPES[value.dtype] for stride in value.strides]
    if base.dtype != value.dtype or seen.offset % item or 0 in value.shape:
        return None
    axes = sorted([axis for axis, size in enumerate(base.shape) if size > 1], key=lambda axis: -base.strides[axis])

    def coordinates(elements: int) -> dict[int, int]:
        found = {}
        for axis in axes:
            found[axis], elements = divmod(elements, base.strides[axis])
        return found

    begin = coordinates(seen.offset // item)
    moves = [coordinates(stride if size > 1 else 0) for size, stride in zip(value.shape, value.strides, strict=True)]
    for axis in axes:
        last = begin[axis] + sum((size - 1) * move[axis] for size, move in zip(value.shape, moves, strict=True))
        if last >= base.shape[axis]:
            return None
    return sum(begin[axis] * steps[axis] for axis in axes), [sum(move[axis] * steps[axis] for axis in axes) for move in moves]


def _steps(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides that matter."""
    return [] if 0 in shape else [stride for size, stride in zip(shape, strides, strict=True) if size != 1]


class AliasingProgram(WritingProgram):
    """A `Program` whose outputs that `manifest.aliases` lists share memory as in eager.

    An output that is an input is the caller's own tensor; one that is a part of it, that part of the caller's tensor, whose layout
    has to have one (input-layout).  One over a weight or state is a live tensor of the program's memory, which later calls read and
    change, for callers on the program's device; else a copy.  It is never guarded.  Outputs that share memory with each other do so
    in what is handed out, too.
    """

    def __init__(self, manifest: Manifest, backend: Backend, on_miss: str, outputs: str) -> None:
        super().__init__(manifest, backend, on_miss, outputs)
        aliases = manifest.aliases
        self._looks = [{alias.output: look(manifest, program, alias) for alias in aliases} for program in manifest.programs]
        self._given = [alias for alias in aliases if alias.memory == INPUTS]
        self._kept = [alias for alias in aliases if alias.memory in PERSISTENT]
        self._tied = [alias for alias in aliases if alias.memory == OUTPUTS]
        self._bases = {alias.index for alias in self._tied}
        wholes = {alias.output for alias in self._given if all(looks[alias.output].whole for looks in self._looks)}
        self._wholes = [alias for alias in self._given if alias.output in wholes]
        self._partial = [alias for alias in self._given if alias.output not in wholes]

    def replay(self, tensors: Sequence[Any]) -> list[Any]:
        """As `Program.replay`; raises input-layout, before anything runs, for an input of which an output is a part."""
        parts = self._parts(tensors) if self._partial and len(tensors) == len(self.inputs) else {}
        made = super().replay(tensors)
        for alias in self._wholes:
            made[alias.output] = tensors[alias.index]
        for output, part in parts.items():
            made[output] = part
        return made

    def _parts(self, tensors: Sequence[Any]) -> dict[int, Any]:
        """The outputs that are parts of the caller's tensors, by position, where the call's sizes were recorded."""
        library = self._library(tensors)
        taken = [library.take(tensor, spec.name) for tensor, spec in zip(tensors, self.inputs, strict=True)]
        shapes = tuple([place[1] for _, place in taken])
        plan = self._plans.get(shapes) or self._plan(shapes)
        if not plan.exact:
            return {}
        found, looks = {}, self._looks[plan.parts[0].program]
        for alias in self._partial:
            tensor, (value, place), seen = tensors[alias.index], taken[alias.index], looks[alias.output]
            if seen.whole:
                found[alias.output] = tensor
                continue
            own = library.name != "torch" or tensor.data_ptr() == place[0]  # of a lazy conjugate or negative a copy was taken
            item = DTYPES[seen.value.dtype]
            there = along(seen, library.steps(value)) if own else None
            if there is None or any(step % item for step in there[1]):
                name, output = self.inputs[alias.index].name, self.outputs[alias.output].name
                raise CallError(
                    "input-layout",
                    f"input {name!r}: output {output!r} shares its memory, and it is laid out otherwise than recorded",
                )
            strides = [step // item for step in there[1]]
            part = library.part(value, seen.value.dtype, seen.value.shape, strides, there[0])
            found[alias.output] = part if self._views else library.finish(part, tensors[0])
        return found

    def _outputs(self, run: _Run, program: int, addresses: list[int]) -> list[Any]:
        """As `Program._outputs`; on the cpu target the shared object's own tensors for aliases are put aside."""
        made = super()._outputs(run, program, addresses)
        if self._backend.device is not None:
            return made
        library, looks = run[0], self._looks[program]
        for alias in self._kept:
            made[alias.output] = _over(library, looks[alias.output], self._backend.place(alias.index), self._backend.owner)
        for alias in self._given:
            made[alias.output] = _over(library, looks[alias.output], addresses[alias.index], None)
        for alias in self._tied:
            made[alias.output] = _part(library, looks[alias.output], made[alias.index])
        return made

    def _hand_out(self, run: _Run, program: int, addresses: list[int], parts: Sequence[tuple[Slices, Slices]] | None) -> list[Any]:
        library, device, _ = run
        made, looks = list(self._outputs(run, program, addresses)), self._looks[program]
        bare = {alias.output for alias in (self._given if parts is None else self._wholes)}  # `replay` puts them in
        done = set(bare)
        if device == self._backend.device:
            bare |= {alias.output for alias in self._kept}
        if not self._views:
            for place in self._bases:
                value = self._rows[program][place]
                flat = library.copy(library.part(made[place], "uint8", (span(value),), (1,), 0))
                made[place] = library.part(flat, value.dtype, value.shape, value.strides, 0)
            done |= self._bases
        for alias in self._tied:
            made[alias.output] = _part(library, looks[alias.output], made[alias.index])
        if parts is not None:
            made = [value[taken] if taken else value for value, (taken, _) in zip(made, parts, strict=True)]
        if self._views:
            for alias in self._given if parts is not None and self._backend.device is None else ():
                made[alias.output] = library.copy(made[alias.output])  # it lies in a filled up input that is gone after the call
            guarded = self._guarded(library, made)
            return [value if place in bare else view for place, (value, view) in enumerate(zip(made, guarded, strict=True))]
        done |= bare | {alias.output for alias in self._tied}
        return [value if place in done else library.copy(value) for place, value in enumerate(made)]


def _over(library: Library, seen: Look, base: int, owner: object) -> Any:
    value = seen.value
    return library.alias(base + seen.offset, value.dtype, value.shape, value.strides, owner)


def _part(library: Library, seen: Look, base: Any) -> Any:
    value = seen.value
    return library.part(base, value.dtype, value.shape, value.strides, seen.offset)
