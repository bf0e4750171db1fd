"""The contents of data symbols of kernel images when they were recorded (`graphs/modules.bin`), and their checks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..format.archive import Archive
from ..format.file_names import kernel_images
from ..format.records import dataclass
from ..format.schema import MEMORIES
from ..format.shapes import graph_memories
from ..format.table import Column, Data, Layout, invalid, symbols, unpack
from .recordings import outside


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """An offset in bytes into a memory (position in MEMORIES)."""

    memory: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Relocation:
    at: int
    target: Address


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleState:
    """A data symbol whose contents had changed when it was recorded; they are written back after the module is loaded."""

    image: str
    symbol: str
    contents: bytes
    relocations: tuple[Relocation, ...]


STATES = Layout(
    magic=b"cgstate\0",
    version=1,
    counts=("states", "relocations", "symbol_bytes", "content_bytes"),
    columns=(
        Column("image", "B", "states", 32),
        Column("symbol_bounds", "I", "states", bounds="symbol_bytes", at="symbol"),
        Column("content_bounds", "Q", "states", bounds="content_bytes", at="contents"),
        Column("relocation_bounds", "I", "states", bounds="relocations", at="relocations"),
        Column("relocation_at", "Q", "relocations"),
        Column("relocation_memory", "B", "relocations", below=len(MEMORIES), at="memory"),
        Column("relocation_offset", "Q", "relocations"),
        Column("symbols", "B", "symbol_bytes"),
        Column("contents", "B", "content_bytes"),
    ),
)


def decode_states(data: Data, where: str = "modules") -> tuple[ModuleState, ...]:
    """Raises table-invalid unless the structure is valid and relocations are inside the contents."""
    _, columns = unpack(STATES, data, where)
    names, limits, contents = columns["symbols"], columns["symbol_bounds"], columns["contents"]
    states = []
    for row, (image, symbol) in enumerate(zip(*symbols(columns["image"], names, limits, where), strict=True)):
        begin, end = columns["content_bounds"][row : row + 2]
        rows = slice(*columns["relocation_bounds"][row : row + 2])
        relocations = []
        free = 0
        for at, memory, offset in zip(
            columns["relocation_at"][rows], columns["relocation_memory"][rows], columns["relocation_offset"][rows], strict=True
        ):
            if at < free or at + 8 > end - begin or any(contents[begin + at : begin + at + 8]):
                raise invalid(f"{where}: states[{row}].relocations", f"byte {at} is no free zeroed word of {end - begin} bytes")
            free = at + 8
            relocations.append(Relocation(at=at, target=Address(memory=memory, offset=offset)))
        data = bytes(contents[begin:end])
        states.append(ModuleState(image=image, symbol=symbol, contents=data, relocations=tuple(relocations)))
    return tuple(states)


def states(bundle: Archive) -> tuple[ModuleState, ...]:
    """The checked states of a bundle; () if it has none. Raises table-invalid."""
    manifest, name = bundle.manifest, bundle.manifest.module_state
    rows = decode_states(bundle.data(name), name) if name else ()
    check_module_states(rows, name, graph_memories(manifest.memories), kernel_images(manifest))
    return rows


def targets(states: Sequence[ModuleState]) -> set[str]:
    """The memories that states point to."""
    return {MEMORIES[row.target.memory] for state in states for row in state.relocations}


def check_module_states(states: Sequence[ModuleState], where: str, memories: Mapping[str, int], images: Collection[str]) -> None:
    """Raises table-invalid unless images are known, symbols are unique, and relocations point into their memories."""
    sizes = [memories.get(name, -1) for name in MEMORIES]
    seen = set()
    for row, state in enumerate(states):
        path = f"{where}: states[{row}]"
        if state.image not in images:
            raise invalid(f"{path}.image", f"{state.image[:16]}... is not among the bundle's images")
        if (state.image, state.symbol) in seen or not state.symbol.isprintable() or not state.symbol:
            raise invalid(f"{path}.symbol", f"{state.symbol[:80]!r} is no symbol, or occurs twice")
        seen.add((state.image, state.symbol))
        for item in state.relocations:
            memory, offset = item.target.memory, item.target.offset
            if offset >= sizes[memory] and (offset or sizes[memory]):
                raise invalid(f"{path}.relocations", f"the word at {item.at} points at {outside(memory, offset, sizes)}")
