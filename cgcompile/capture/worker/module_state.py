"""Finds module state: variables of kernel images that kernels can write, or that differ from their initial bytes in the image.

A library may set a variable before its first launch: cuFFT's `lut_sp` points to a table that cuFFT allocated.  A newly loaded
module has the initial bytes instead.  Sessions that share a module would write to the same variable."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import BuildError
from ...targets.cuda.elf import WRITABLE, Cubin, Symbol
from ..take import RawModuleState
from .address_map import AddressMap
from .driver import allocation, driver, read_device, succeeded

SECTIONS = (".nv.global", ".nv.constant")
"""Sections of module variables.  Symbols in other sections (shared memory) keep no contents between launches."""

LIBRARIES = ("4cuda3std", "6thrust")
"""Mangled namespaces of libcu++ and Thrust.  PyTorch's kernels contain dozens of their tags and function objects
(`cuda::std::ranges::swap`).  These are objects of empty classes: one byte that no kernel reads or writes."""


def kept_variables(modules: Mapping[str, int], cubins: Mapping[str, Cubin], addresses: AddressMap) -> tuple[RawModuleState, ...]:
    """Returns the changed or writable variables of the images in `modules` (image -> CUmodule handle), sorted.  A writable variable
    may look unchanged: kernels reset some to zero, such as a counter of finished blocks.

    cuModuleGetGlobal finds no handle for some symbols.  Such a symbol is read at its offset from another one of its section, if it
    lies in the same allocation.  Raises module-state-unreadable if it can be read nowhere and is writable, or if it was changed.
    """
    states: list[RawModuleState] = []
    for image, module in sorted(modules.items()):
        handles: dict[str, int] = {}
        starts: dict[str, tuple[int, int, int]] = {}
        missing: list[str] = []
        variables = [s for s in cubins[image].data if s.section.startswith(SECTIONS) and not _is_empty_object(s)]
        for symbol in variables:
            result = driver.cuModuleGetGlobal(driver.CUmodule(module), symbol.name.encode())
            if succeeded(result):
                handles[symbol.name] = int(result[1])
                piece = allocation(int(result[1]))
                if piece:
                    starts[symbol.section] = (int(result[1]) - symbol.value, piece[0], piece[0] + piece[1])
        for symbol in variables:
            address = handles.get(symbol.name)
            if address is None and symbol.section in starts:
                start, low, high = starts[symbol.section]
                if low <= start + symbol.value <= high - len(symbol.initial):
                    address = start + symbol.value
            if address is None:
                missing += [symbol.name] if symbol.section == WRITABLE else []
                continue
            contents = read_device(address, len(symbol.initial))
            if contents == symbol.initial and (symbol.section != WRITABLE or symbol.name not in handles):
                continue  # unchanged; if writable, another variable of its section has a handle, and is kept
            if symbol.name not in handles:
                raise BuildError(
                    "module-state-unreadable",
                    f"image {image[:12]}: variable {symbol.name} was changed, and has no handle to restore it by",
                )
            states.append(RawModuleState(image=image, symbol=symbol.name, block=addresses.block(contents, None)))
        if missing:
            raise BuildError(
                "module-state-unreadable",
                f"image {image[:12]}: {len(missing)} variables that kernels can write have no handle: {', '.join(missing[:3])}",
            )
    return tuple(sorted(states, key=lambda s: (s.image, s.symbol)))


def _is_empty_object(symbol: Symbol) -> bool:
    return symbol.initial == b"\0" and any(name in symbol.name for name in LIBRARIES)
