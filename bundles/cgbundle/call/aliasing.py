"""Output aliasing: outputs that share memory with an input, a weight, state or another output, as in eager PyTorch.

Of every such output the program's values say where it lies beside what it shares memory with, at the recorded sizes.  A call that
is padded shares what still fits: whole inputs, live weights and state, outputs with each other.  Of one that is cut the parts have
been put together in tensors of their own, and only whole inputs are the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CallError
from ..format.schema import DTYPES, PERSISTENT, Alias, EntrySpec, Manifest, Program, Value
from ..format.spans import moving, span
from ..tensors.library import Descriptor, Library
from ..validate.state import base_of
from .plan import Plan, Slices

if TYPE_CHECKING:
    from .backend import Backend

INPUTS, OUTPUTS = "inputs", "outputs"


class AliasLayout(NamedTuple):
    """How an output (`value`) lies beside what it shares memory with (`base`) at one int_key: `offset` in bytes from its first
    element.  `whole`: it is all of it, laid out alike."""

    value: Value
    base: Value
    offset: int
    whole: bool


def alias_layout(manifest: Manifest, program: Program, alias: Alias) -> AliasLayout:
    """How an alias lies at the recorded sizes of a program."""
    value = program.values[program.outputs[alias.output]]
    base = base_of(manifest, program, alias)
    offset = value.offset - (base.offset if manifest.target.kind == "cuda" else 0)
    alike = (base.dtype, base.shape) == (value.dtype, value.shape)
    whole = offset == 0 and alike and moving(value.shape, base.strides) == moving(value.shape, value.strides)
    return AliasLayout(value, base, offset, whole)


def rebase(seen: AliasLayout, steps: Sequence[int]) -> tuple[int, list[int]] | None:
    """Where a view of an input lies in the caller's own tensor, whose axes have strides of `steps` bytes: (bytes from its first
    element, strides of the view in bytes).

    None where that tensor has no such view.  An axis of the view may run over several axes of the input, as that of a flattened one
    does, which only lie so in the recorded layout.  Or the dtypes differ, and the tensor is laid out otherwise.
    """
    base, value = seen.base, seen.value
    item = DTYPES[base.dtype]
    if moving(base.shape, [stride * item for stride in base.strides]) == moving(base.shape, steps):
        return seen.offset, [stride * DTYPES[value.dtype] for stride in value.strides]
    if base.dtype != value.dtype or seen.offset % item or 0 in value.shape:
        return None
    axes = sorted([axis for axis, size in enumerate(base.shape) if size > 1], key=lambda axis: -base.strides[axis])

    def coordinates(elements: int) -> dict[int, int]:
        places = {}
        for axis in axes:
            places[axis], elements = divmod(elements, base.strides[axis])
        return places

    begin = coordinates(seen.offset // item)
    moves = [coordinates(stride if size > 1 else 0) for size, stride in zip(value.shape, value.strides, strict=True)]
    for axis in axes:
        last = begin[axis] + sum((size - 1) * move[axis] for size, move in zip(value.shape, moves, strict=True))
        if last >= base.shape[axis]:
            return None
    return sum(begin[axis] * steps[axis] for axis in axes), [sum(move[axis] * steps[axis] for axis in axes) for move in moves]


class OutputAliases:
    """The outputs that `EntrySpec.aliases` lists, which share memory as in eager.

    An output that is an input is the caller's own tensor.  One that is a part of it is that part of the caller's tensor, whose
    layout has to have one (input-layout).  One over a weight or state is a live tensor of the program's memory, for callers on the
    program's device; else a copy.  It is never guarded.  Outputs that share memory with each other do so in what is handed out.
    """

    def __init__(self, manifest: Manifest, entry: EntrySpec, backend: Backend, *, views: bool) -> None:
        aliases = entry.aliases
        self._backend, self._views, self._inputs, self._outputs = backend, views, entry.inputs, entry.outputs
        self._layouts = [{alias.output: alias_layout(manifest, program, alias) for alias in aliases} for program in entry.programs]
        self._given = [alias for alias in aliases if alias.memory == INPUTS]
        self._kept = [alias for alias in aliases if alias.memory in PERSISTENT]
        self._tied = [alias for alias in aliases if alias.memory == OUTPUTS]
        bases = {alias.index for alias in self._tied}
        self._bases = [{index: row.values[row.outputs[index]] for index in bases} for row in entry.programs]
        wholes = {alias.output for alias in self._given if all(layouts[alias.output].whole for layouts in self._layouts)}
        self._wholes = [alias for alias in self._given if alias.output in wholes]
        self._partial = [alias for alias in self._given if alias.output not in wholes]

    def of_inputs(
        self, library: Library, plan: Plan, tensors: Sequence[Any], values: Sequence[Any], descriptors: Sequence[Descriptor]
    ) -> dict[int, Any]:
        """The outputs that are the caller's `tensors` or parts of them, by position; parts where the call's sizes were recorded.

        Raises input-layout, before anything runs, for an input of which an output is a part.
        """
        shared = {alias.output: tensors[alias.index] for alias in self._wholes}
        if not plan.exact:
            return shared
        layouts = self._layouts[plan.parts[0].program]
        for alias in self._partial:
            tensor, value, seen = tensors[alias.index], values[alias.index], layouts[alias.output]
            if seen.whole:
                shared[alias.output] = tensor
                continue
            # of a lazy conjugate or negative of torch a copy was taken
            in_place = library.name != "torch" or tensor.data_ptr() == descriptors[alias.index][0]
            item = DTYPES[seen.value.dtype]
            there = rebase(seen, library.byte_strides(value)) if in_place else None
            if there is None or any(step % item for step in there[1]):
                name, output = self._inputs[alias.index].name, self._outputs[alias.output].name
                raise CallError(
                    "input-layout",
                    f"input {name!r}: output {output!r} shares its memory, and its layout is not the recorded one",
                )
            strides = [step // item for step in there[1]]
            part = library.as_strided(value, seen.value.dtype, seen.value.shape, strides, there[0])
            shared[alias.output] = part if self._views else library.converted(part, tensors[0])
        return shared

    def wrap(self, call: tuple[Library, int | None, Any], program: int, values: list[Any], addresses: Sequence[int]) -> list[Any]:
        """The outputs of a replay; on the cpu target those that are aliases are taken from what they share memory with."""
        library, _, stream = call
        backend, layouts = self._backend, self._layouts[program]
        if backend.device is not None:
            return values
        for alias in self._kept:
            values[alias.output] = _over(
                library, layouts[alias.output], backend.address(alias.index, stream), (backend.owner, stream)
            )
        for alias in self._given:
            values[alias.output] = _over(library, layouts[alias.output], addresses[alias.index], None)
        for alias in self._tied:
            values[alias.output] = _part(library, layouts[alias.output], values[alias.index])
        return values

    def share(
        self,
        library: Library,
        device: int | None,
        program: int,
        outputs: Sequence[Any],
        parts: Sequence[tuple[Slices, Slices]] | None,
    ) -> tuple[list[Any], set[int]]:
        """(the outputs, the positions of those that are handed out as they are: neither copied nor guarded).

        `parts` as for `Outputs.replay`.  What `of_inputs` gives takes the place of these later.
        """
        values, layouts = list(outputs), self._layouts[program]
        bare = {alias.output for alias in (self._given if parts is None else self._wholes)}
        if device == self._backend.device:
            bare |= {alias.output for alias in self._kept}
        if not self._views:
            for index, value in self._bases[program].items():
                flat = library.copy(library.as_strided(values[index], "uint8", (span(value),), (1,), 0))
                values[index] = library.as_strided(flat, value.dtype, value.shape, value.strides, 0)
            bare |= self._bases[program].keys() | {alias.output for alias in self._tied}
        for alias in self._tied:
            values[alias.output] = _part(library, layouts[alias.output], values[alias.index])
        if parts is not None:
            values = [value[taken] if taken else value for value, (taken, _) in zip(values, parts, strict=True)]
            if self._views and self._backend.device is None:
                for alias in self._given:
                    # it lies in a padded input that is gone after the call
                    values[alias.output] = library.copy(values[alias.output])
        return values, bare


def _over(library: Library, seen: AliasLayout, base: int, owner: object) -> Any:
    value = seen.value
    return library.wrap(base + seen.offset, value.dtype, value.shape, value.strides, owner)


def _part(library: Library, seen: AliasLayout, base: Any) -> Any:
    value = seen.value
    return library.as_strided(base, value.dtype, value.shape, value.strides, seen.offset)
