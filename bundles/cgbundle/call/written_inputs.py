"""Inputs that the model writes to: a call leaves in the caller's own tensors what the model wrote.

The backend works on the caller's memory, or brings it up to date when the replay is done.  A tensor that is laid out otherwise than
recorded goes through a copy that is copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import CallError
from ..format.schema import DTYPES, EntrySpec, TensorSpec
from ..tensors.library import Descriptor, Library
from ..tensors.overlap import folds, reach, shared
from ..tensors.tensor import Tensor, dense, is_dense


class WrittenInputs:
    """The inputs that `entry.mutated_inputs` lists."""

    __slots__ = ("_inputs", "_written")

    def __init__(self, entry: EntrySpec) -> None:
        self._inputs, self._written = entry.inputs, entry.mutated_inputs

    def targets(
        self, library: Library, tensors: Sequence[Any], values: Sequence[Any], found: Sequence[Descriptor]
    ) -> list[tuple[int, Any]]:
        """The written inputs whose memory the replay cannot work on: (position, that memory as a tensor), for `copy_back`.

        Raises input-unwritable, before anything runs, for a tensor that cannot be written to.
        """
        self._check_apart(library, values, found)
        made = []
        for index in self._written:
            spec, tensor = self._inputs[index], tensors[index]
            target = library.writable(tensor, spec.name)
            address, shape, _, strides, _ = found[index]
            steps = dense(shape) if strides is None else library.strides(values[index])
            if is_dense(shape, steps, spec.order) and library.describe(target)[0] == address:
                continue
            if library.name == "dlpack" and not (isinstance(tensor, Tensor) and tensor.device is None):
                hint = "pass a tensor whose axes lie in memory in the order of the signature, without gaps"
                raise _unwritable(spec, "it is not laid out as recorded", hint)
            made.append((index, target))
        return made

    @staticmethod
    def copy_back(targets: Sequence[tuple[int, Any]], values: Sequence[Any]) -> None:
        """Copies to the caller's memory what the replay left in the copies that took its place in `values`."""
        for index, target in targets:
            copied = values[index]
            target[tuple([slice(0, size) for size in copied.shape])] = copied

    def _check_apart(self, library: Library, values: Sequence[Any], found: Sequence[Descriptor]) -> None:
        """Raises input-unwritable where memory that is written to is also another input's, or twice this one's."""
        places = []
        for value, (address, shape, dtype, _, _) in zip(values, found, strict=True):
            places.append(reach(address, shape, library.byte_strides(value), DTYPES[dtype]))
        for index in self._written:
            if found[index][3] is not None and folds(places[index]):
                raise _unwritable(self._inputs[index], "its elements share memory", "pass a copy of the expanded tensor")
        for one, other in shared(places, self._written):
            reason = f"it shares memory with input {self._inputs[other].name!r}"
            raise _unwritable(self._inputs[one], reason, "pass a copy of one of them")


def _unwritable(spec: TensorSpec, reason: str, hint: str) -> CallError:
    return CallError("input-unwritable", f"input {spec.name!r}: the model writes to it, and {reason}", hint)
