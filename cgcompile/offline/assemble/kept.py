"""Places donated outputs: output buffers that a later call uses in place.  They lie below the part of the arena that all programs
share.  Pure; offsets and sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cgbundle.format.schema import DonatedRange, IntKey

from ...targets.cuda.donations import DonatedOutput, refused, reserved_end, reserved_parts
from ...targets.memory_layout import align
from ..lowered import TEMPORARY, LoweredProgram


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """`offsets`: key -> position in `Lowered.buffers` -> offset in memory arena.  `start`: the offset of the shared part."""

    reserved: tuple[DonatedRange, ...]
    offsets: Mapping[IntKey, Mapping[int, int]]
    start: int


def keep_outputs(programs: Mapping[IntKey, LoweredProgram], donated: Mapping[IntKey, tuple[DonatedOutput, ...]]) -> Kept:
    """Places the buffers of the `donated` outputs of each key one after the other.  Keys of one entry use the same bytes.  Raises
    donation-refused for an output that is in no temporary buffer."""
    places_by_key: dict[IntKey, dict[int, int]] = {}
    needs: dict[str, int] = {}
    for key, outputs in donated.items():
        places, end = places_by_key.setdefault(key, {}), 0
        for output in outputs:
            program = programs[key]
            buffer = program.regions[output.region].outputs[output.output].pointer.buffer
            buffer_row = program.lowered.buffers[buffer]
            if buffer_row.kind != TEMPORARY:
                raise refused(output.entry, output.number, f"is a {buffer_row.kind} of the program itself")
            if buffer not in places:
                places[buffer], end = end, align(end + buffer_row.nbytes)
        needs[outputs[0].entry] = max(needs.get(outputs[0].entry, 0), end)
    reserved = reserved_parts(needs)
    begins = {donated_range.entry: donated_range.offset for donated_range in reserved}
    placed = {
        key: {buffer: begins[outputs[0].entry] + offset for buffer, offset in places_by_key[key].items()}
        for key, outputs in donated.items()
    }
    return Kept(reserved=reserved, offsets=placed, start=reserved_end(reserved))
