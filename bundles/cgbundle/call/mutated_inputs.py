"""Mutated inputs: a call leaves in the caller's own tensors what the model wrote to them.

The backend works on the caller's memory, or brings it up to date when the replay is done.  A tensor that is laid out otherwise than
recorded goes through a copy that is copied back.  Memory of two inputs may overlap only where neither is written to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import CallError
from ..format.schema import DTYPES, EntrySpec, TensorSpec
from ..format.spans import dense, is_dense
from ..tensors.library import Descriptor, Library
from ..tensors.tensor import Tensor


class MutatedInputs:
    """The inputs that `EntrySpec.mutated_inputs` lists."""

    __slots__ = ("_inputs", "_written")

    def __init__(self, entry: EntrySpec) -> None:
        self._inputs, self._written = entry.inputs, entry.mutated_inputs

    def targets(
        self, library: Library, tensors: Sequence[Any], values: Sequence[Any], descriptors: Sequence[Descriptor]
    ) -> list[tuple[int, Any]]:
        """The written inputs whose memory the replay cannot work on: (position, that memory as a tensor), for `copy_back`.

        Raises input-unwritable, before anything runs, for a tensor that cannot be written to.
        """
        self._check_apart(library, values, descriptors)
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
        """Copies to the caller's memory what the replay left in the copies that took its place in `values`."""
        for index, target in targets:
            copied = values[index]
            target[tuple([slice(0, size) for size in copied.shape])] = copied

    def _check_apart(self, library: Library, values: Sequence[Any], descriptors: Sequence[Descriptor]) -> None:
        """Raises input-unwritable where memory that is written to is also another input's, or twice this one's."""
        places = []
        for value, (address, shape, dtype, _, _) in zip(values, descriptors, strict=True):
            places.append(reach(address, shape, library.byte_strides(value), DTYPES[dtype]))
        for index in self._written:
            if descriptors[index][3] is not None and folds(places[index]):
                raise _unwritable(self._inputs[index], "its elements share memory", "pass a copy of the expanded tensor")
        for one, other in shared(places, self._written):
            reason = f"it shares memory with input {self._inputs[other].name!r}"
            raise _unwritable(self._inputs[one], reason, "pass a copy of one of them")


def _unwritable(spec: TensorSpec, reason: str, hint: str) -> CallError:
    return CallError("input-unwritable", f"input {spec.name!r}: the model writes to it, and {reason}", hint)


# --- overlap of memory ----------------------------------------------------------------------------------------------


class Reach(NamedTuple):
    """Where the elements of a tensor lie: its first byte and the one behind its last, and the bytes of an element.  `axes`:
    (length, bytes from one element to the next) of those longer than 1."""

    start: int
    end: int
    item: int
    axes: tuple[tuple[int, int], ...]


def reach(address: int, shape: Sequence[int], strides: Sequence[int], item: int) -> Reach:
    """The reach of a tensor with `strides` in bytes, which may be negative; `item` are the bytes of an element."""
    if 0 in shape:
        return Reach(address, address, item, ())
    axes = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size > 1]
    start = address + sum((size - 1) * step for size, step in axes if step < 0)
    axes = [(size, abs(step)) for size, step in axes]
    return Reach(start, start + _span(axes, item), item, tuple(axes))


def folds(tensor: Reach) -> bool:
    """Whether elements of one tensor may share memory, as those of an expanded one do."""
    covered = tensor.item
    for size, step in sorted(tensor.axes, key=lambda axis: axis[1]):
        if step < covered:
            return True
        covered += (size - 1) * step
    return False


def apart(one: Reach, other: Reach) -> bool:
    """Whether two tensors are sure to share no byte: they lie one behind the other, or in columns of one table."""
    if one.end <= other.start or other.end <= one.start:
        return True
    for row in {step for _, step in (*one.axes, *other.axes)} - {0}:
        between = (other.start - one.start) % row
        if between >= _width(one, row) and between + _width(other, row) <= row:
            return True
    return False


def shared(tensors: Sequence[Reach], written: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(a tensor that is written to, another) by position, for every such pair that may share memory."""
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
    """Bytes that a tensor takes of a row: of the axes that do not lead from row to row."""
    return _span([(size, step) for size, step in tensor.axes if step % row], tensor.item)


def _span(axes: Sequence[tuple[int, int]], item: int) -> int:
    return sum((size - 1) * step for size, step in axes) + item
