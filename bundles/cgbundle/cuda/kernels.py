"""Kernels of a recording on the GPU: images, each loaded once, with data symbols set to their recorded contents; and the parameters
of a table's rows as the driver takes them, with this process's addresses, for both executors."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from struct import Struct
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import BundleError
from ..format.archive import Archive
from ..format.file_names import KERNELS
from ..format.schema import MEMORIES
from ..format.table import KERNEL, Table
from ..validate.contents import check_elf
from .driver import call, cu
from .libcuda import MEMORY_TYPE_DEVICE
from .structures import KernelNodeParams, LaunchAttributeValue, Memcpy3D

if TYPE_CHECKING:
    from ..validate.module_state import ModuleState

GROWING = (8, 14)  # function attributes whose largest value fits all: dynamic shared memory, non-portable cluster size


class Addresses(Protocol):
    def address(self, memory: str, offset: int) -> int: ...


class Modules:
    """A bundle's images by SHA-256, loaded on first use. `states`: variables that kernels may write, with `memories` for their
    pointers. Functions of images without states come from `common`, if given. Raises file-damaged, table-invalid, driver-failed,
    OutOfMemory."""

    __slots__ = ("_bundle", "_common", "_functions", "_memories", "_modules", "_settings", "_states")

    def __init__(
        self,
        bundle: Archive,
        states: Iterable[ModuleState] = (),
        memories: Addresses | None = None,
        common: Modules | None = None,
    ) -> None:
        self._bundle, self._memories, self._common = bundle, memories, common
        self._states: dict[str, list[ModuleState]] = {}
        for state in states:
            self._states.setdefault(state.image, []).append(state)
        self._modules: dict[str, Any] = {}
        self._functions: dict[tuple[str, str], Any] = {}
        self._settings: dict[tuple[str, str, int], int] = {}

    def function(self, image: str, symbol: str, params: Sequence[tuple[int, int]], settings: Iterable[tuple[int, int]]) -> Any:
        """The CUfunction with its attributes set to `settings`. `params`: (offset, size) that it must have."""
        if self._common is not None and image not in self._states:
            return self._common.function(image, symbol, params, settings)
        function = self._functions.get((image, symbol))
        if function is None:
            module = self._module(image)
            function = call("cuModuleGetFunction", module, symbol.encode(), detail=f"{symbol} of {image[:16]}...")
            _check_params(function, image, symbol, params)
            self._functions[image, symbol] = function
        for number, value in settings:
            self._set(function, (image, symbol, number), value)
        return function

    def close(self) -> None:
        with ExitStack() as closing:
            for module in self._modules.values():
                closing.callback(call, "cuModuleUnload", module)
            self._modules, self._functions = {}, {}

    def _set(self, function: Any, key: tuple[str, str, int], value: int) -> None:
        number = key[2]
        before = self._settings.get(key)
        if before is not None and (before == value or (number in GROWING and before > value)):
            return
        call("cuFuncSetAttribute", function, number, value, detail=f"attribute {number} = {value} of {key[1]}")
        self._settings[key] = value

    def _module(self, image: str) -> Any:
        module = self._modules.get(image)
        if module is None:
            # As bytes: the interpreter adds a zero byte, which PTX needs and a cubin ignores.
            data = self._bundle.data(f"{KERNELS}{image}")
            if not data.isascii():  # PTX is ASCII, and only tests use it
                check_elf(data, f"{KERNELS}{image}")
            module = call("cuModuleLoadData", data, detail=f"kernels/{image}")
            with ExitStack() as undo:
                undo.callback(cu.cuModuleUnload, module)
                for state in self._states.get(image, ()):
                    self._restore(module, state)
                undo.pop_all()
            self._modules[image] = module
        return module

    def _restore(self, module: Any, state: ModuleState) -> None:
        path = f"{state.symbol} of {state.image[:16]}..."
        address, size = call("cuModuleGetGlobal", module, state.symbol.encode(), detail=path)
        if len(state.contents) > size:
            raise BundleError("table-invalid", f"module state {path}: {len(state.contents)} bytes, the symbol has {size}")
        contents = bytearray(state.contents)
        for item in state.relocations:
            assert self._memories is not None  # states come with the memories that they refer to
            target = self._memories.address(MEMORIES[item.target.memory], item.target.offset)
            contents[item.at : item.at + 8] = target.to_bytes(8, "little")
        call("cuMemcpyHtoD", address, bytes(contents), len(contents), detail=path)


def _check_params(function: Any, image: str, symbol: str, params: Sequence[tuple[int, int]]) -> None:
    """Raises table-invalid for other parameters than the image's: with fewer, the driver would read out of bounds."""
    actual: list[tuple[int, int]] = []
    while not (answer := cu.cuFuncGetParamInfo(function, len(actual)))[0]:
        actual.append((int(answer[1]), int(answer[2])))
    if actual != list(params):
        raise BundleError(
            "table-invalid", f"{symbol} of {image[:16]}...: the image takes parameters {actual}, the table says {list(params)}"
        )


# --- launches -------------------------------------------------------------------------------------------------------------


MEMORY_SYNC_DOMAIN_MAP = 9  # a launch attribute whose values are bytes
INPUTS = MEMORIES.index("inputs")

CopyingLaunch = Callable[[Sequence[int], Any], bool]
"""Launches a recording and copies each output to an address, in stream order. False, without a launch, if the driver refuses an
address."""

_WORD = Struct("<Q")


class Launches:
    """The kernels' functions and parameter blocks. `params[row]`: address of the array of pointers to the parameters of kernel
    `row`, valid while this object lives. Undefined bytes are `poison`, or zero for None."""

    __slots__ = ("_blocks", "_pointers", "_table", "functions", "params")

    def __init__(self, table: Table, modules: Modules, bases: Sequence[int], poison: int | None) -> None:
        self._table = table
        layouts = [table.param_offset[slice(*ends)].tolist() for ends in pairwise(table.param_bounds)]
        self._blocks, self._pointers = patch(table, bases, poison), array("Q")
        start, counts = self._blocks.buffer_info()[0], []
        for function, offset in zip(table.function, table.block_offset, strict=True):
            counts.append(8 * len(self._pointers))
            self._pointers.extend([start + offset + param for param in layouts[function]])
        first = self._pointers.buffer_info()[0]
        self.params = [first + count for count in counts]
        self.functions: list[Any] = []  # loaded last: the driver loads nothing while it pins memory for the weights
        for row, (image, symbol) in enumerate(zip(table.images, table.symbols, strict=True)):
            params = list(zip(layouts[row], table.param_size[slice(*table.param_bounds[row : row + 2])], strict=True))
            span = slice(*table.function_attribute_bounds[row : row + 2])
            settings = zip(table.function_attribute_id[span], table.function_attribute_value[span], strict=True)
            self.functions.append(modules.function(image, symbol, params, settings))

    def block(self, row: int) -> bytes:
        begin = self._table.block_offset[row]
        return self._blocks[begin : begin + self._table.block_size[row]].tobytes()

    def set_handle(self, number: int, handle: int) -> None:
        table = self._table
        for kernel, at, conditional in zip(table.handle_kernel, table.handle_at, table.handle_conditional, strict=True):
            if conditional == number:
                _WORD.pack_into(self._blocks, table.block_offset[kernel] + at, handle)


class Reader:
    """A kernel of an executable graph with addresses of memory inputs, and its own parameters. `words`: parameters by offset in
    memory inputs. `set` passes them to the driver, for later launches."""

    __slots__ = ("_block", "_pointers", "set", "words")

    def __init__(self, table: Table, row: int, launches: Launches, params: KernelNodeParams, set: Callable[[Any], None]) -> None:
        """`params`: the node's parameters, whose pointers will point into this object."""
        self._block = (ctypes.c_ubyte * max(1, table.block_size[row])).from_buffer_copy(launches.block(row).ljust(1, b"\0"))
        start, function = ctypes.addressof(self._block), table.function[row]
        offsets = table.param_offset[slice(*table.param_bounds[function : function + 2])]
        self._pointers = (ctypes.c_uint64 * max(1, len(offsets)))(*[start + offset for offset in offsets])
        params.kernelParams = ctypes.addressof(self._pointers)
        self.words = [
            (table.relocation_offset[index], ctypes.c_uint64.from_buffer(self._block, table.relocation_at[index]))
            for index in range(*table.relocation_bounds[row : row + 2])
            if table.relocation_memory[index] == INPUTS
        ]
        self.set = partial(set, params)


def patch(table: Table, bases: Sequence[int], poison: int | None) -> array[int]:
    """The table's parameter blocks with addresses in relocated words; `bases`: addresses of the memories."""
    blocks, write = array("B", table.blocks.tobytes()), _WORD.pack_into
    limits = table.relocation_bounds.tolist()
    targets = list(zip(table.relocation_at, table.relocation_memory, table.relocation_offset, strict=True))
    for kernel, begin in enumerate(table.block_offset):
        for at, memory, offset in targets[limits[kernel] : limits[kernel + 1]]:
            write(blocks, begin + at, bases[memory] + offset)
        if poison is not None:
            span = slice(*table.undefined_bounds[kernel : kernel + 2])
            for offset, size in zip(table.undefined_offset[span], table.undefined_size[span], strict=True):
                blocks[begin + offset : begin + offset + size] = array("B", [poison]) * size
    return blocks


def attributes(table: Table, row: int) -> list[tuple[int, LaunchAttributeValue]]:
    values = []
    for index in range(*table.attribute_bounds[row : row + 2]):
        number = table.attribute_id[index]
        words = table.attribute_value[3 * index : 3 * index + 3]
        size = 1 if number == MEMORY_SYNC_DOMAIN_MAP else 4
        data = b"".join((word % (1 << 8 * size)).to_bytes(size, "little") for word in words)
        values.append((number, LaunchAttributeValue.from_buffer_copy(data.ljust(64, b"\0"))))
    return values


def copy_params(table: Table, row: int, bases: Sequence[int]) -> Memcpy3D:
    params = Memcpy3D()
    params.srcMemoryType = params.dstMemoryType = MEMORY_TYPE_DEVICE
    params.srcDevice = bases[table.memcpy_memory[2 * row]] + table.memcpy_offset[2 * row]
    params.dstDevice = bases[table.memcpy_memory[2 * row + 1]] + table.memcpy_offset[2 * row + 1]
    params.WidthInBytes, params.Height, params.Depth = table.memcpy_extent[3 * row : 3 * row + 3]
    params.srcPitch, params.srcHeight, params.dstPitch, params.dstHeight = table.memcpy_pitch[4 * row : 4 * row + 4]
    return params


def memset_value(table: Table, row: int) -> int:
    """The low bytes of the value: a recorded -1 may have four bytes set for a one-byte element."""
    return int(table.memset_value[row] % (1 << 8 * table.memset_element[row]))


def rows(table: Table) -> Iterator[tuple[int, int]]:
    """(kind, row within its kind) of every node."""
    counts = [0, 0, 0, 0, 0]
    for kind in table.kind:
        yield kind, counts[kind]
        counts[kind] += 1


def describe(table: Table, position: int, kind: int, row: int) -> str:
    symbol = f" ({table.symbols[table.function[row]]})" if kind == KERNEL else ""
    return f"{table.where}: nodes[{position}]{symbol}"
