"""Outputs whose sizes depend on data: the elements that count, by the numbers that the replay gave beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..format.schema import EntrySpec
from ..tensors.dlpack import LEGACY_STREAM
from ..tensors.library import library_of
from ..tensors.tensor import Tensor
from .backend import Backend
from .locks import during
from .outputs import View


class DataSizes:
    """Cuts the outputs of an entry's calls to their true sizes.  On a GPU that waits for the call's end."""

    def __init__(self, entry: EntrySpec, backend: Backend) -> None:
        self._rows, self._backend = entry.data_sizes, backend
        self._counts = sorted({row.count for row in entry.data_sizes})
        self._axes = {index: len(spec.shape) for index, spec in enumerate(entry.outputs)}

    def builder(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """The builder of a result, of what a replay gives."""
        return lambda outputs: build(self.cut(outputs))

    def cut(self, outputs: Sequence[Any]) -> list[Any]:
        """The outputs of a replay, flat, with those of `entry.data_sizes` as large as they are; the counts stay behind them."""
        numbers = {place: self._number(outputs[place]) for place in self._counts}
        taken: dict[int, list[slice]] = {}
        for row in self._rows:
            slices = taken.setdefault(row.output, [slice(None)] * self._axes[row.output])
            slices[row.axis] = slice(0, numbers[row.count])
        return [_part(value, tuple(taken[index])) if index in taken else value for index, value in enumerate(outputs)]

    def _number(self, value: Any) -> int:
        value = value.tensor if type(value) is View else value
        if type(value) is not Tensor:
            return int(value)
        if value.device is None:
            return int(value.tolist())
        address = value.address
        return int.from_bytes(during(self._backend, LEGACY_STREAM, lambda stream: self._backend.read(address, 8, stream)), "little")


def _part(value: Any, slices: tuple[slice, ...]) -> Any:
    """The front of a tensor, row-major where it is a copy of the caller's."""
    if type(value) is View:
        return value.part(slices)
    part = value[slices]
    if all(part_of_axis == slice(None) for part_of_axis in slices[1:]):
        return part
    library = library_of(part)
    return library.copy(library.take(part, "")[0]) if library.name != "dlpack" or type(part) is Tensor else part
