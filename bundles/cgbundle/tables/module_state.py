"""What the data symbols of kernel images held when they were recorded: `graphs/modules.bin`."""

from __future__ import annotations

from collections.abc import Sequence

from ..format.schema import MEMORIES
from .column_file import (
    Column,
    Data,
    Layout,
    bounds,
    check_below,
    check_bounds,
    image_bytes,
    image_names,
    invalid,
    pack,
    strings,
    unpack,
    utf8,
)
from .recording import Address, ModuleState, Relocation

STATES = Layout(
    magic=b"cgstate\0",
    version=1,
    counts=("states", "relocations", "symbol_bytes", "content_bytes"),
    columns=(
        Column("image", "B", "states", 32),
        Column("symbol_bounds", "I", "states", 1, 1),
        Column("content_bounds", "Q", "states", 1, 1),
        Column("relocation_bounds", "I", "states", 1, 1),
        Column("relocation_at", "Q", "relocations"),
        Column("relocation_memory", "B", "relocations"),
        Column("relocation_offset", "Q", "relocations"),
        Column("symbols", "B", "symbol_bytes"),
        Column("contents", "B", "content_bytes"),
    ),
)


def encode_states(states: Sequence[ModuleState]) -> bytes:
    """The bytes of `graphs/modules.bin`, in the order given.  Raises table-invalid where a field has no place in the format."""
    symbols = [utf8(state.symbol) for state in states]
    relocations = [item for state in states for item in state.relocations]
    contents = b"".join(state.contents for state in states)
    columns = {
        "image": b"".join(image_bytes(state.image) for state in states),
        "symbol_bounds": bounds(map(len, symbols)),
        "content_bounds": bounds(len(state.contents) for state in states),
        "relocation_bounds": bounds(len(state.relocations) for state in states),
        **relocation_columns(relocations),
        "symbols": b"".join(symbols),
        "contents": contents,
    }
    sizes = len(states), len(relocations), sum(map(len, symbols)), len(contents)
    return pack(STATES, dict(zip(STATES.counts, sizes, strict=True)), columns)


def decode_states(data: Data, where: str = "modules") -> tuple[ModuleState, ...]:
    """The module states in `data`.  Raises table-invalid unless the structure is sound and relocations lie in their contents."""
    counts, columns = unpack(STATES, data, where)
    total, symbols, contents = counts["states"], columns["symbols"], columns["contents"]
    check_bounds(columns["symbol_bounds"], len(symbols), f"{where}: symbol")
    check_bounds(columns["content_bounds"], len(contents), f"{where}: contents")
    check_bounds(columns["relocation_bounds"], counts["relocations"], f"{where}: relocations")
    check_below(columns["relocation_memory"], len(MEMORIES), f"{where}: memory")
    names = strings(symbols, columns["symbol_bounds"], where)
    images = image_names(columns["image"])
    states = []
    for row in range(total):
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
        states.append(
            ModuleState(image=images[row], symbol=names[row], contents=bytes(contents[begin:end]), relocations=tuple(relocations))
        )
    return tuple(states)


def relocation_columns(relocations: Sequence[Relocation]) -> dict[str, list[int]]:
    """The columns of relocations, whose names both kinds of file share."""
    return {
        "relocation_at": [item.at for item in relocations],
        "relocation_memory": [item.target.memory for item in relocations],
        "relocation_offset": [item.target.offset for item in relocations],
    }
