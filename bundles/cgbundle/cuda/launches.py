"""What both executors need of a table's rows: parameters as the driver takes them, at this process's addresses."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from struct import Struct
from typing import Any, Protocol

from ..format.schema import MEMORIES
from ..tables.table import KERNEL, Table
from .libcuda import MEMORY_TYPE_DEVICE, KernelNodeParams, LaunchAttributeValue, Memcpy3D
from .modules import Modules

MEMORY_SYNC_DOMAIN_MAP = 9
"""A launch attribute whose values are bytes."""

INPUTS = MEMORIES.index("inputs")

CopyingLaunch = Callable[[Sequence[int], Any], bool]
"""Launches a recording, and copies each of its program's outputs to an address, in the order of the stream.  False where the driver
takes no such address: nothing was launched then."""

_WORD = Struct("<Q")


class Executor(Protocol):
    """A recording, ready to run at the addresses it was made for.

    `readers`: its kernels that are given addresses of memory inputs, all of them, where they can be given others.
    """

    readers: Sequence[Reader]

    def launch(self, stream: Any) -> None:
        """Runs the recording in the order of the stream; returns before it is done."""

    def copying(self) -> CopyingLaunch | None:
        """A launch that copies outputs too; None where there is none."""

    def join(self, stream: Any) -> None:
        """Makes the recording a part of what is being captured on the stream."""

    def close(self) -> None:
        """Gives the driver's objects back."""


class Reader:
    """A kernel of an executable graph that is given addresses of memory inputs, with parameters of its own.

    `words`: by offset in memory inputs, where such an address stands among the parameters.  `give` hands them to the driver: for
    launches from then on, not for those that were made.
    """

    __slots__ = ("_block", "_pointers", "give", "words")

    def __init__(self, table: Table, row: int, launches: Launches, params: KernelNodeParams, give: Callable[[Any], None]) -> None:
        """`params`: the kernel's, whose pointers become those of this object."""
        self._block = (ctypes.c_ubyte * max(1, table.block_size[row])).from_buffer_copy(launches.block(row).ljust(1, b"\0"))
        start, function = ctypes.addressof(self._block), table.function[row]
        offsets = table.param_offset[slice(*table.param_bounds[function : function + 2])]
        self._pointers = (ctypes.c_uint64 * max(1, len(offsets)))(*[start + offset for offset in offsets])
        params.kernelParams = ctypes.addressof(self._pointers)
        self.words: list[tuple[int, ctypes.c_uint64]] = []
        for index in range(*table.relocation_bounds[row : row + 2]):
            if table.relocation_memory[index] == INPUTS:
                word = ctypes.c_uint64.from_buffer(self._block, table.relocation_at[index])
                self.words.append((table.relocation_offset[index], word))
        self.give = partial(give, params)


class Launches:
    """What both executors need of the kernels: functions, and parameter blocks that hold this process's addresses.

    `params[row]` is the address of the array of pointers to the parameters of kernel `row`; it is valid while this object lives.
    Bytes of undefined ranges are `poison`, or zero when that is None.  `handles`: by conditional node where its handle goes, as
    positions in the blocks.
    """

    __slots__ = ("_blocks", "_offsets", "_pointers", "_sizes", "functions", "handles", "params")

    def __init__(self, table: Table, modules: Modules, bases: Sequence[int], poison: int | None) -> None:
        layouts: list[list[int]] = []
        self.functions: list[Any] = []
        for row, (image, symbol) in enumerate(zip(table.images, table.symbols, strict=True)):
            own = slice(table.param_bounds[row], table.param_bounds[row + 1])
            layouts.append(table.param_offset[own].tolist())
            params = list(zip(layouts[-1], table.param_size[own], strict=True))
            own = slice(table.function_attribute_bounds[row], table.function_attribute_bounds[row + 1])
            settings = zip(table.function_attribute_id[own], table.function_attribute_value[own], strict=True)
            self.functions.append(modules.function(image, symbol, params, settings))
        self._blocks, self._offsets, self._sizes = patch(table, bases, poison), table.block_offset, table.block_size
        start = self._blocks.buffer_info()[0]
        self._pointers = array("Q")
        counts = []
        for function, offset in zip(table.function, table.block_offset, strict=True):
            counts.append(8 * len(self._pointers))
            self._pointers.extend([start + offset + param for param in layouts[function]])
        first = self._pointers.buffer_info()[0]
        self.params = [first + count for count in counts]
        self.handles: dict[int, list[int]] = {}
        for kernel, at, number in zip(table.handle_kernel, table.handle_at, table.handle_conditional, strict=True):
            self.handles.setdefault(number, []).append(table.block_offset[kernel] + at)

    def block(self, row: int) -> bytes:
        """The parameters of kernel `row`."""
        begin = self._offsets[row]
        return self._blocks[begin : begin + self._sizes[row]].tobytes()

    def give_handle(self, number: int, handle: int) -> None:
        """Writes the handle of conditional node `number` into the blocks of the kernels that set its condition."""
        for at in self.handles[number]:
            _WORD.pack_into(self._blocks, at, handle)


def patch(table: Table, bases: Sequence[int], poison: int | None) -> array[int]:
    """The table's parameter blocks with every relocated word the address of its target: `bases` are the memories' addresses."""
    blocks = array("B", table.blocks.tobytes())
    write = _WORD.pack_into
    limits = table.relocation_bounds.tolist()
    rows = list(zip(table.relocation_at, table.relocation_memory, table.relocation_offset, strict=True))
    for kernel, begin in enumerate(table.block_offset):
        for at, memory, offset in rows[limits[kernel] : limits[kernel + 1]]:
            write(blocks, begin + at, bases[memory] + offset)
        if poison is not None:
            own = slice(table.undefined_bounds[kernel], table.undefined_bounds[kernel + 1])
            for offset, size in zip(table.undefined_offset[own], table.undefined_size[own], strict=True):
                blocks[begin + offset : begin + offset + size] = array("B", [poison]) * size
    return blocks


def attributes(table: Table, row: int) -> list[tuple[int, LaunchAttributeValue]]:
    """The launch attributes of kernel `row`: (number, value)."""
    found = []
    for index in range(table.attribute_bounds[row], table.attribute_bounds[row + 1]):
        number = table.attribute_id[index]
        words = table.attribute_value[3 * index : 3 * index + 3]
        size = 1 if number == MEMORY_SYNC_DOMAIN_MAP else 4
        data = b"".join((word % (1 << 8 * size)).to_bytes(size, "little") for word in words)
        found.append((number, LaunchAttributeValue.from_buffer_copy(data.ljust(64, b"\0"))))
    return found


def copy_params(table: Table, row: int, bases: Sequence[int]) -> Memcpy3D:
    """Memcpy `row` as the driver takes it."""
    params = Memcpy3D()
    params.srcMemoryType = params.dstMemoryType = MEMORY_TYPE_DEVICE
    params.srcDevice = bases[table.memcpy_memory[2 * row]] + table.memcpy_offset[2 * row]
    params.dstDevice = bases[table.memcpy_memory[2 * row + 1]] + table.memcpy_offset[2 * row + 1]
    params.WidthInBytes, params.Height, params.Depth = table.memcpy_extent[3 * row : 3 * row + 3]
    params.srcPitch, params.srcHeight, params.dstPitch, params.dstHeight = table.memcpy_pitch[4 * row : 4 * row + 4]
    return params


def memset_value(table: Table, row: int) -> int:
    """The value's low bytes, as many as an element has: a recorded -1 may have four of them set for a single byte."""
    return int(table.memset_value[row] % (1 << 8 * table.memset_element[row]))


def rows(table: Table) -> Iterator[tuple[int, int]]:
    """(kind, row among those of its kind) of every node."""
    counts = [0, 0, 0, 0, 0]
    for kind in table.kind:
        yield kind, counts[kind]
        counts[kind] += 1


def describe(table: Table, position: int, kind: int, row: int) -> str:
    symbol = f" ({table.symbols[table.function[row]]})" if kind == KERNEL else ""
    return f"{table.where}: nodes[{position}]{symbol}"
