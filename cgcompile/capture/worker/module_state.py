"""Module state: variables of the kernel images used that kernels can write, or that no longer hold their initial bytes; every data
symbol is compared.  A library may set one before its first launch: cuFFT's `lut_sp` points to a table that cuFFT allocated.  A
module loaded afresh would hold the initial bytes instead, and one that sessions share would let them write to the same variable."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import BuildError
from ...targets.cuda.elf import WRITABLE, Cubin, Symbol
from ..take import RawModuleState
from .address_map import AddressMap
from .driver import allocation, driver, read_device, succeeded

SECTIONS = (".nv.global", ".nv.constant")
"""Sections of module variables; symbols elsewhere (shared memory) hold nothing between launches."""

LIBRARIES = ("4cuda3std", "6thrust")
"""Namespaces of libcu++ and Thrust, as names of symbols spell them.  PyTorch's own kernels carry dozens of their tags and function
objects (`cuda::std::ranges::swap`), which are of empty classes: one byte that nobody reads or writes."""


def kept_variables(modules: Mapping[str, int], cubins: Mapping[str, Cubin], addresses: AddressMap) -> tuple[RawModuleState, ...]:
    """The variables of the images in `modules` (image -> CUmodule handle) that were changed, or that kernels can write, sorted: one
    that they bring back to zero, such as a counter of finished blocks, looks unchanged.

    A symbol without a handle is read at its distance from one of its section, if that lies in the same allocation: an address
    outside could be host memory.  Raises module-state-unreadable when a section that kernels can write has no handle at all.
    """
    states: list[RawModuleState] = []
    for image, module in sorted(modules.items()):
        handles: dict[str, int] = {}
        starts: dict[str, tuple[int, int, int]] = {}
        lost: list[str] = []
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
                lost += [symbol.name] if symbol.section == WRITABLE else []
                continue
            contents = read_device(address, len(symbol.initial))
            if contents == symbol.initial and (symbol.section != WRITABLE or symbol.name not in handles):
                continue  # without a handle: another one of its section has one, and is kept
            if symbol.name not in handles:
                raise BuildError(
                    "module-state-unreadable",
                    f"image {image[:12]}: variable {symbol.name} was changed, and has no handle to restore it by",
                )
            states.append(RawModuleState(image=image, symbol=symbol.name, block=addresses.block(contents, None)))
        if lost:
            raise BuildError(
                "module-state-unreadable",
                f"image {image[:12]}: {len(lost)} variables that kernels can write have no handle: {', '.join(lost[:3])}",
            )
    return tuple(sorted(states, key=lambda s: (s.image, s.symbol)))


def _is_empty_object(symbol: Symbol) -> bool:
    return symbol.initial == b"\0" and any(name in symbol.name for name in LIBRARIES)
