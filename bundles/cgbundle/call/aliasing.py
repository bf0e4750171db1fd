"""Memory that calls share with the caller: outputs that alias an input, a weight, state or another output as in eager PyTorch, and
inputs that the model writes to. Outputs of a padded call alias whole inputs, weights, state and other outputs. Those of a chunked
call alias whole inputs only, because they are assembled from chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CallError
from ..format.schema import DTYPES, PERSISTENT, Alias, EntrySpec, Manifest, Program, TensorSpec, Value
from ..format.shapes import dense, is_dense, moving, span
from ..tensors.library import Descriptor, Library
from ..tensors.tensor import Tensor
from ..validate.state import base_of
from .plan import Plan, Slices

if TYPE_CHECKING:
    from .backend import Backend

INPUTS, OUTPUTS = "inputs", "outputs"


class AliasLayout(NamedTuple):
    """The layout of an output (`value`) and of the tensor that it shares memory with (`base`) at one int_key: `offset` in bytes
    from the base's first element. `whole`: the output is all of the base."""

    value: Value
    base: Value
    offset: int
    whole: bool


def alias_layout(manifest: Manifest, program: Program, alias: Alias) -> AliasLayout:
    value, base = program.values[program.outputs[alias.output]], base_of(manifest, program, alias)
    offset = value.offset - (base.offset if manifest.target.kind == "cuda" else 0)
    alike = (base.dtype, base.shape) == (value.dtype, value.shape)
    whole = offset == 0 and alike and moving(value.shape, base.strides) == moving(value.shape, value.strides)
    return AliasLayout(value, base, offset, whole)


def rebase(seen: AliasLayout, steps: Sequence[int]) -> tuple[int, list[int]] | None:
    """The (offset, strides) in bytes of a view of an input, in the caller's tensor with strides of `steps` bytes. None if a layout
    other than the recorded one has no such view: the dtypes differ, or an axis of the view covers several axes of the input."""
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
    """The outputs in `EntrySpec.aliases`. For an alias of an input a call returns the caller's tensor or a part of it, or raises
    input-layout. For an alias of a weight or state it returns a tensor over that memory, without a guard, to callers on the
    program's device, else a copy. Outputs that share memory with each other do so in the results."""

    def __init__(self, manifest: Manifest, entry: EntrySpec, backend: Backend, *, views: bool) -> None:
        aliases = entry.aliases
        self._backend, self._views, self._inputs, self._outputs = backend, views, entry.inputs, entry.outputs
        self._layouts = [{alias.output: alias_layout(manifest, program, alias) for alias in aliases} for program in entry.programs]
        self._input_aliases = [alias for alias in aliases if alias.memory == INPUTS]
        self._weight_aliases = [alias for alias in aliases if alias.memory in PERSISTENT]
        self._output_aliases = [alias for alias in aliases if alias.memory == OUTPUTS]
        bases = {alias.index for alias in self._output_aliases}
        self._bases = [{index: row.values[row.outputs[index]] for index in bases} for row in entry.programs]
        wholes = {alias.output for alias in self._input_aliases if all(layouts[alias.output].whole for layouts in self._layouts)}
        self._wholes = [alias for alias in self._input_aliases if alias.output in wholes]
        self._partial = [alias for alias in self._input_aliases if alias.output not in wholes]

    def of_inputs(
        self, library: Library, plan: Plan, tensors: Sequence[Any], values: Sequence[Any], descriptors: Sequence[Descriptor]
    ) -> dict[int, Any]:
        """The outputs that are the caller's tensors or parts of them, by position; parts only at recorded sizes. Raises
        input-layout before anything runs."""
        shared = {alias.output: tensors[alias.index] for alias in self._wholes}
        for alias in self._partial if plan.exact else ():
            tensor, value = tensors[alias.index], values[alias.index]
            seen = self._layouts[plan.parts[0].program][alias.output]
            if seen.whole:
                shared[alias.output] = tensor
                continue
            # a lazy conjugate or negative tensor of torch was copied
            in_place = library.name != "torch" or tensor.data_ptr() == descriptors[alias.index][0]
            item = DTYPES[seen.value.dtype]
            view = rebase(seen, library.byte_strides(value)) if in_place else None
            if view is None or any(step % item for step in view[1]):
                name, output = self._inputs[alias.index].name, self._outputs[alias.output].name
                text = f"input {name!r}: output {output!r} shares its memory, and its layout is not the recorded one"
                raise CallError("input-layout", text)
            strides = [step // item for step in view[1]]
            part = library.as_strided(value, seen.value.dtype, seen.value.shape, strides, view[0])
            shared[alias.output] = part if self._views else library.converted(part, tensors[0])
        return shared

    def wrap(self, call: tuple[Library, int | None, Any], program: int, values: list[Any], addresses: Sequence[int]) -> list[Any]:
        """The outputs of a replay. On the cpu target aliases are created over the memory that they share."""
        library, _, stream = call
        backend, layouts = self._backend, self._layouts[program]
        if backend.device is not None:
            return values
        for alias in self._weight_aliases:
            address = backend.address(alias.index, stream)
            values[alias.output] = _over(library, layouts[alias.output], address, (backend.owner, stream))
        for alias in self._input_aliases:
            values[alias.output] = _over(library, layouts[alias.output], addresses[alias.index], None)
        for alias in self._output_aliases:
            values[alias.output] = _part(library, layouts[alias.output], values[alias.index])
        return values

    def share(
        self, library: Library, device: int | None, program: int, outputs: Sequence[Any],
        parts: Sequence[tuple[Slices, Slices]] | None,
    ) -> tuple[list[Any], set[int]]:  # fmt: skip
        """(outputs, positions of those that are neither copied nor guarded). `parts` as for `Outputs.replay`. The results of
        `of_inputs` replace some later."""
        values, layouts = list(outputs), self._layouts[program]
        bare = {alias.output for alias in (self._input_aliases if parts is None else self._wholes)}
        if device == self._backend.device:
            bare |= {alias.output for alias in self._weight_aliases}
        if not self._views:
            for index, value in self._bases[program].items():
                flat = library.copy(library.as_strided(values[index], "uint8", (span(value),), (1,), 0))
                values[index] = library.as_strided(flat, value.dtype, value.shape, value.strides, 0)
            bare |= self._bases[program].keys() | {alias.output for alias in self._output_aliases}
        for alias in self._output_aliases:
            values[alias.output] = _part(library, layouts[alias.output], values[alias.index])
        if parts is not None:
            values = [value[valid] if valid else value for value, (valid, _) in zip(values, parts, strict=True)]
            if self._views and self._backend.device is None:
                for alias in self._input_aliases:  # it is in a padded input, which is freed after the call
                    values[alias.output] = library.copy(values[alias.output])
        return values, bare


def _over(library: Library, seen: AliasLayout, base: int, owner: object) -> Any:
    value = seen.value
    return library.wrap(base + seen.offset, value.dtype, value.shape, value.strides, owner)


def _part(library: Library, seen: AliasLayout, base: Any) -> Any:
    value = seen.value
    return library.as_strided(base, value.dtype, value.shape, value.strides, seen.offset)


# --- inputs that a call writes to ----------------------------------------------------------------------------------------


class MutatedInputs:
    """The inputs in `EntrySpec.mutated_inputs`. The backend writes to the caller's memory. A tensor with another layout than
    recorded is copied, and copied back. Memory of two inputs may overlap only if neither is written."""

    __slots__ = ("_inputs", "_written")

    def __init__(self, entry: EntrySpec) -> None:
        self._inputs, self._written = entry.inputs, entry.mutated_inputs

    def targets(
        self, library: Library, tensors: Sequence[Any], values: Sequence[Any], descriptors: Sequence[Descriptor]
    ) -> list[tuple[int, Any]]:
        """(position, tensor over the caller's memory) of the mutated inputs that need `copy_back`. Raises input-unwritable before
        anything runs: also if written memory is shared by another input, or by elements of this one."""
        places = []
        for value, (address, shape, dtype, _, _) in zip(values, descriptors, strict=True):
            places.append(reach(address, shape, library.byte_strides(value), DTYPES[dtype]))
        for index in self._written:
            if descriptors[index][3] is not None and folds(places[index]):
                raise _unwritable(self._inputs[index], "its elements share memory", "pass a copy of the expanded tensor")
        for one, other in shared(places, self._written):
            reason = f"it shares memory with input {self._inputs[other].name!r}"
            raise _unwritable(self._inputs[one], reason, "pass a copy of one of them")
        targets = []
        for index in self._written:
            spec, tensor = self._inputs[index], tensors[index]
            target = library.writable(tensor, spec.name)
            address, shape, _, strides, _ = descriptors[index]
            steps = dense(shape) if strides is None else library.strides(values[index])
            if is_dense(shape, steps, spec.order) and library.describe(target)[0] == address:
                continue
            if library.name == "dlpack" and not (isinstance(tensor, Tensor) and tensor.device is None):
                hint = "pass a tensor whose axes lie in memory in the order of the signature, without gaps"
                raise _unwritable(spec, "it is not laid out as recorded", hint)
            targets.append((index, target))
        return targets

    @staticmethod
    def copy_back(targets: Sequence[tuple[int, Any]], values: Sequence[Any]) -> None:
        """Copies `values` to the caller's memory."""
        for index, target in targets:
            copied = values[index]
            target[tuple([slice(0, size) for size in copied.shape])] = copied


def _unwritable(spec: TensorSpec, reason: str, hint: str) -> CallError:
    return CallError("input-unwritable", f"input {spec.name!r}: the model writes to it, and {reason}", hint)


# --- overlap of memory ----------------------------------------------------------------------------------------------


class Reach(NamedTuple):
    """The memory of a tensor: first byte, end, bytes of an element. `axes`: (length, stride in bytes) of those longer than 1."""

    start: int
    end: int
    item: int
    axes: tuple[tuple[int, int], ...]


def reach(address: int, shape: Sequence[int], strides: Sequence[int], item: int) -> Reach:
    """`strides` in bytes, which may be negative; `item`: bytes of an element."""
    if 0 in shape:
        return Reach(address, address, item, ())
    axes = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size > 1]
    start = address + sum((size - 1) * step for size, step in axes if step < 0)
    axes = [(size, abs(step)) for size, step in axes]
    return Reach(start, start + _span(axes, item), item, tuple(axes))


def folds(tensor: Reach) -> bool:
    """Whether elements of one tensor may share memory, as in an expanded tensor."""
    covered = tensor.item
    for size, step in sorted(tensor.axes, key=lambda axis: axis[1]):
        if step < covered:
            return True
        covered += (size - 1) * step
    return False


def apart(one: Reach, other: Reach) -> bool:
    """Whether two tensors surely share no byte: their ranges do not overlap, or they are columns of one table."""
    if one.end <= other.start or other.end <= one.start:
        return True
    for row in {step for _, step in (*one.axes, *other.axes)} - {0}:
        between = (other.start - one.start) % row
        if between >= _width(one, row) and between + _width(other, row) <= row:
            return True
    return False


def shared(tensors: Sequence[Reach], written: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Positions (written tensor, other tensor) of every pair that may share memory."""
    marked, end = set(written), 0
    filled = [index for index, tensor in enumerate(tensors) if tensor.end > tensor.start]
    order = sorted(filled, key=lambda index: tensors[index].start)
    for place, index in enumerate(order):
        if tensors[index].start < end:
            for earlier in order[:place]:
                if (index in marked or earlier in marked) and not apart(tensors[earlier], tensors[index]):
                    yield (index, earlier) if index in marked else (earlier, index)
        end = max(end, tensors[index].end)


def _width(tensor: Reach, row: int) -> int:
    """Bytes of a tensor in one row: of the axes that stay inside a row."""
    return _span([(size, step) for size, step in tensor.axes if step % row], tensor.item)


def _span(axes: Sequence[tuple[int, int]], item: int) -> int:
    return sum((size - 1) * step for size, step in axes) + item
