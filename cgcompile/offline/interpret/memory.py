"""The memories of a bundle in one buffer, filled with poison; every access is checked.  Addresses are positions in that buffer.
Because of gaps before and after each memory, accesses to address 0 or just outside a memory are errors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from cgbundle.format.schema import MEMORIES

from ...errors import BuildError
from .sums import Sum, lines
from .values import Array

GAP, ALIGNMENT = 4096, 256
"""The minimum bytes before and between memories, and the driver's alignment of an allocation."""

POISON = 0xFF
"""The value of every byte that was not written.  It is NaN in all float types, -1 in integers."""

ROUNDS = 64
"""If an address occurs more often in an atomic operation, elements are processed one by one."""

Journal = list[tuple[Array, Array, Array]]


class Memory:
    """`sizes`: (name of schema.MEMORIES, bytes) of each.  `where`: the kernel's name in messages.  While `journal` is a list,
    stores record the values that they overwrite, and `undo` restores them."""

    def __init__(self, sizes: Sequence[tuple[str, int]]) -> None:
        self.where = ""
        self.journal: Journal | None = None
        self._names = [name for name, _ in sizes]
        self._starts: list[int] = []
        self._ends: list[int] = []
        end = 0
        for _, size in sizes:
            self._starts.append(-(-(end + GAP) // ALIGNMENT) * ALIGNMENT)
            end = self._starts[-1] + size
            self._ends.append(end)
        self.buffer: Array = np.full(-(-(end + GAP) // ALIGNMENT) * ALIGNMENT, POISON, np.uint8)

    def address(self, memory: int, offset: int) -> int:
        """Returns the address of a byte of a memory (position in schema.MEMORIES).  Raises access-outside if the memory does not
        exist."""
        if MEMORIES[memory] not in self._names:
            raise BuildError(
                "access-outside", f"{self.where} names memory {MEMORIES[memory]!r}, which this recording does not have"
            )
        return self._starts[self._names.index(MEMORIES[memory])] + offset

    def span(self, memory: int, offset: int, nbytes: int, verb: str = "reads") -> Array:
        """Returns a view of a range of bytes of a memory.  Raises access-outside."""
        start = self.address(memory, offset)
        if nbytes:
            self._check(np.array([start, start + nbytes - 1]), 1, verb)
        return self.buffer[start : start + nbytes]

    def load(self, pointers: Array, mask: Array | None, other: Array | None, dtype: np.dtype[np.generic]) -> Array:
        """Loads elements.  Where `mask` is false nothing is read, and the value is that of `other`, or poison."""
        view = self.buffer.view(dtype)
        shift = dtype.itemsize.bit_length() - 1
        if mask is None or mask.all():
            self._check(pointers, dtype.itemsize, "reads")
            elements: Array = view.take(pointers >> shift)
            return elements if mask is None else np.broadcast_to(elements, np.broadcast_shapes(elements.shape, mask.shape))
        pointers, mask = np.broadcast_arrays(pointers, mask)
        shape = pointers.shape if other is None else np.broadcast_shapes(pointers.shape, other.shape)
        result = np.empty(shape, dtype)
        result[...] = np.full(dtype.itemsize, POISON, np.uint8).view(dtype)[0] if other is None else other
        if shape != pointers.shape:
            pointers, mask = np.broadcast_to(pointers, shape), np.broadcast_to(mask, shape)
        active = pointers[mask]
        if active.size:
            self._check(active, dtype.itemsize, "reads")
            result[mask] = view.take(active >> shift)
        return result

    def load_lines(self, pointers: Sum, dtype: np.dtype[np.generic]) -> Array | None:
        """Loads elements that are contiguous along an axis, line by line.  Returns None if they are not, or may be outside a
        memory; then use `load`."""
        layout, (low, high) = lines(pointers, dtype.itemsize), pointers.bounds()
        region = bisect_right(self._starts, low) - 1
        if layout is None or region < 0 or high + dtype.itemsize > self._ends[region]:
            return None
        axis, begins, count = layout
        width = count * dtype.itemsize
        windows = np.ndarray((len(self.buffer) // dtype.itemsize - count + 1,), f"V{width}", self.buffer, 0, (dtype.itemsize,))
        line_indices = (begins >> (dtype.itemsize.bit_length() - 1)).reshape(-1)
        copied = windows[line_indices].view(dtype).reshape(*begins.shape[:axis], *begins.shape[axis + 1 :], count)
        ordered = np.ascontiguousarray(np.moveaxis(copied, -1, axis))  # faster in products, with the same rounding as `load`
        return np.broadcast_to(ordered, pointers.shape)

    def store(self, pointers: Array, values: Array, mask: Array | None) -> None:
        dtype = values.dtype
        if mask is None or mask.all():
            pointers, values = np.broadcast_arrays(pointers, values)
        else:
            pointers, values, mask = np.broadcast_arrays(pointers, values, mask)
            pointers, values = pointers[mask], values[mask]
        if pointers.size:
            self._check(pointers, dtype.itemsize, "writes")
            self._write(self.buffer.view(dtype), pointers >> (dtype.itemsize.bit_length() - 1), values)

    def atomic(
        self,
        pointers: Array,
        operands: tuple[Array, ...],
        mask: Array,
        dtype: np.dtype[np.generic],
        combine: Callable[[Array, tuple[Array, ...]], Array],
    ) -> Array:
        """Writes combine(old, operands) for every element of `pointers`, in order.  All arrays have one shape, whose first axis
        counts the instances.  Returns the old values, poison where `mask` is false.  Values have their stored type."""
        result = np.full((*pointers.shape, dtype.itemsize), POISON, np.uint8).view(dtype)[..., 0]
        active = pointers[mask]
        if not active.size:
            return result
        self._check(active, dtype.itemsize, "writes")
        view = self.buffer.view(dtype)
        places = active >> (dtype.itemsize.bit_length() - 1)
        active_operands = tuple(operand[mask] for operand in operands)
        old = np.empty(places.shape, dtype)
        for indices in _rounds(places):
            old[indices] = view[places[indices]]
            self._write(view, places[indices], combine(old[indices], tuple(operand[indices] for operand in active_operands)))
        result[mask] = old
        return result

    def undo(self) -> None:
        """Restores the values in the journal, last ones first, and empties it."""
        for view, places, old in reversed(self.journal or []):
            view[places] = old
        self.journal = [] if self.journal is not None else None

    def _write(self, view: Array, places: Array, values: Array) -> None:
        if self.journal is not None:
            self.journal.append((view, places, view[places]))
        view[places] = values

    def _check(self, pointers: Array, size: int, verb: str) -> None:
        low, high = int(pointers.min()), int(pointers.max())
        region = bisect_right(self._starts, low) - 1
        if region < 0 or high + size > self._ends[region]:
            regions = np.searchsorted(self._starts, pointers, "right") - 1
            ends = np.array([*self._ends, 0])[regions]  # region -1, before the first memory, has end 0
            outside = pointers[pointers + size > ends]
            if outside.size:
                raise self._error(int(outside[0]), size, verb, f", {outside.size} of {pointers.size} elements outside")
        if size > 1 and int(np.bitwise_or.reduce(pointers, axis=None)) & (size - 1):
            raise self._error(int(pointers[(pointers & (size - 1)) != 0][0]), size, verb, ", which is not aligned")

    def _error(self, address: int, size: int, verb: str, what: str) -> BuildError:
        regions = zip(self._names, self._starts, self._ends, strict=True)
        name, start, end = min(regions, key=lambda region: max(region[1] - address, address - region[2]))
        at = f"byte {address - start} of memory {name!r} ({end - start} bytes)"
        return BuildError("access-outside", f"{self.where} {verb} {size} bytes at {at}{what}")


def _rounds(places: Array) -> list[Array]:
    """Splits the indices of `places` into rounds.  No place occurs twice in a round, and equal places keep their order."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    number = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    if number.max() > ROUNDS:
        return [order[i : i + 1] for i in range(len(order))]
    return [order[number == i] for i in range(int(number.max()) + 1)]
