"""The contents of data symbols of kernel images when they were recorded: `graphs/modules.bin`."""

from __future__ import annotations

from ..format.records import dataclass
from ..format.schema import MEMORIES
from .table import Column, Data, Layout, invalid, symbols, unpack


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
