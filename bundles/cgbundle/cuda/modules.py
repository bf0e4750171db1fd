"""Kernel images on the GPU, each loaded once, with data symbols set to their recorded contents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import BundleError
from ..format.archive import Archive
from ..format.file_names import KERNELS, kernel_images
from ..format.schema import MEMORIES
from ..format.spans import graph_memories
from ..validate.contents import check_elf
from .driver import call, cu

if TYPE_CHECKING:
    from ..tables.module_state import ModuleState

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


def states(bundle: Archive) -> tuple[ModuleState, ...]:
    manifest, name = bundle.manifest, bundle.manifest.module_state
    if not name:
        return ()
    from ..tables.module_state import decode_states  # few bundles have any
    from ..validate.recordings import check_module_states

    rows = decode_states(bundle.data(name), name)
    check_module_states(rows, name, graph_memories(manifest.memories), kernel_images(manifest))
    return rows


def _check_params(function: Any, image: str, symbol: str, params: Sequence[tuple[int, int]]) -> None:
    """Raises table-invalid for other parameters than the image's: with fewer, the driver would read out of bounds."""
    actual: list[tuple[int, int]] = []
    while not (answer := cu.cuFuncGetParamInfo(function, len(actual)))[0]:
        actual.append((int(answer[1]), int(answer[2])))
    if actual != list(params):
        raise BundleError(
            "table-invalid", f"{symbol} of {image[:16]}...: the image takes parameters {actual}, the table says {list(params)}"
        )
