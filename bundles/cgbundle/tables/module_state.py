"""What the data symbols of kernel images held when they were recorded: `graphs/modules.bin`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..format.schema import MEMORIES
from .column_file import Column, Data, Layout, bounds, check_below, check_bounds, invalid, pack, symbols, unpack
from .recording import Address, Function, ModuleState, Relocation

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
    relocations = [item for state in states for item in state.relocations]
    contents = b"".join(state.contents for state in states)
    columns = {
        **symbol_columns(states),
        "content_bounds": bounds(len(state.contents) for state in states),
        "relocation_bounds": bounds(len(state.relocations) for state in states),
        **relocation_columns(relocations),
        "contents": contents,
    }
    sizes = len(states), len(relocations), len(columns["symbols"]), len(contents)
    return pack(STATES, dict(zip(STATES.counts, sizes, strict=True)), columns)


def decode_states(data: Data, where: str = "modules") -> tuple[ModuleState, ...]:
    """The module states in `data`.  Raises table-invalid unless the structure is sound and relocations lie in their contents."""
    counts, columns = unpack(STATES, data, where)
    names, limits, contents = columns["symbols"], columns["symbol_bounds"], columns["contents"]
    check_bounds(limits, len(names), f"{where}: symbol")
    check_bounds(columns["content_bounds"], len(contents), f"{where}: contents")
    check_bounds(columns["relocation_bounds"], counts["relocations"], f"{where}: relocations")
    check_below(columns["relocation_memory"], len(MEMORIES), f"{where}: memory")
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


def symbol_columns(rows: Sequence[ModuleState | Function]) -> dict[str, Any]:
    """The columns of symbols and their images, whose names both kinds of file share.  Raises table-invalid."""
    try:
        names = [row.symbol.encode() for row in rows]
    except UnicodeEncodeError as error:
        raise invalid(f"symbol {error.object[:80]!r}", "not UTF-8") from None
    return {"symbol_bounds": bounds(map(len, names)), "symbols": b"".join(names), "image": b"".join(map(_image_bytes, rows))}


def _image_bytes(row: ModuleState | Function) -> bytes:
    try:
        data = bytes.fromhex(row.image)
    except ValueError:
        data = b""
    if len(data) != 32 or data.hex() != row.image:
        raise invalid(f"image {row.image[:80]!r}", "expected a SHA-256 of 64 lower-case digits")
    return data


def relocation_columns(relocations: Sequence[Relocation]) -> dict[str, list[int]]:
    """As `symbol_columns`, of relocations."""
    return {
        "relocation_at": [item.at for item in relocations],
        "relocation_memory": [item.target.memory for item in relocations],
        "relocation_offset": [item.target.offset for item in relocations],
    }
