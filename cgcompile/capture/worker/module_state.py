"""Finds module state: global variables of kernel images that kernels can write, or whose contents are not the initial bytes.

A library may set a variable before its first launch: cuFFT's `lut_sp` points to a table that cuFFT allocated.  In a newly
loaded module the variable has its initial bytes, so the runtime must restore it.  If kernels write to a variable, sessions cannot
share the module."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import BuildError
from ...targets.cuda.elf import WRITABLE, Cubin, Symbol
from ..take import RawModuleState
from .address_map import AddressMap
from .driver import allocation, driver, read_device, succeeded

SECTIONS = (".nv.global", ".nv.constant")
"""Sections of module variables.  Symbols in other sections (shared memory) lose their contents after a launch."""

EMPTY_CLASS_NAMESPACES = ("4cuda3std", "6thrust")
"""Mangled namespaces of libcu++ and Thrust.  Images of PyTorch's kernels contain dozens of their variables, such as
`cuda::std::ranges::swap`.  These are objects of empty classes.  Each has one byte, which no kernel reads or writes."""


def find_module_state(modules: Mapping[str, int], cubins: Mapping[str, Cubin], addresses: AddressMap) -> tuple[RawModuleState, ...]:
    """Returns the changed or writable variables of the images in `modules` (image -> CUmodule handle), sorted.  A writable variable
    is returned even if it has its initial bytes, because kernels may reset it: for example, a counter of finished blocks.

    cuModuleGetGlobal returns no address for some symbols.  Their addresses are computed from the offset to another symbol of the
    section, if both lie in the same allocation.  Raises module-state-unreadable in two cases: a writable symbol has no
    address, or a symbol without an address from cuModuleGetGlobal was changed.
    """
    states: list[RawModuleState] = []
    for image, module in sorted(modules.items()):
        addresses_by_name: dict[str, int] = {}
        starts: dict[str, tuple[int, int, int]] = {}
        missing: list[str] = []
        variables = [s for s in cubins[image].data if s.section.startswith(SECTIONS) and not _is_empty_object(s)]
        for symbol in variables:
            result = driver.cuModuleGetGlobal(driver.CUmodule(module), symbol.name.encode())
            if succeeded(result):
                addresses_by_name[symbol.name] = int(result[1])
                block = allocation(int(result[1]))
                if block:
                    starts[symbol.section] = (int(result[1]) - symbol.value, block[0], block[0] + block[1])
        for symbol in variables:
            address = addresses_by_name.get(symbol.name)
            if address is None and symbol.section in starts:
                start, low, high = starts[symbol.section]
                if low <= start + symbol.value <= high - len(symbol.initial):
                    address = start + symbol.value
            if address is None:
                missing += [symbol.name] if symbol.section == WRITABLE else []
                continue
            contents = read_device(address, len(symbol.initial))
            if contents == symbol.initial and (symbol.section != WRITABLE or symbol.name not in addresses_by_name):
                continue  # unchanged; of a writable section, another variable is returned
            if symbol.name not in addresses_by_name:
                raise BuildError(
                    "module-state-unreadable",
                    f"image {image[:12]}: variable {symbol.name} was changed, but the driver gives no address to restore it",
                )
            states.append(RawModuleState(image=image, symbol=symbol.name, block=addresses.block(contents, None)))
        if missing:
            raise BuildError(
                "module-state-unreadable",
                f"image {image[:12]}: the driver gives no address of {len(missing)} variables that kernels can write: "
                f"{', '.join(missing[:3])}",
            )
    return tuple(sorted(states, key=lambda s: (s.image, s.symbol)))


def _is_empty_object(symbol: Symbol) -> bool:
    return symbol.initial == b"\0" and any(name in symbol.name for name in EMPTY_CLASS_NAMESPACES)
