"""The check of an arena plan, derived again from the order of launches alone.  Pure.

`planning` believes Allocate and Release; this does not look at them, and shares no code with it.  A buffer is needed from the first
event that names it to the last, whichever region either is in, and to the end when it is an output.  Two buffers that are needed at
one event must not share a byte.  So nothing that is still to be read, by a later region or the host, can be written over, and an
output stays what its last writer made it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush

from ...errors import BuildError
from ..lowered import TEMPORARY, Copy, Fill, HostRead, Launch, Lowered, Pointer
from .arena import Plan

ALIGNMENT = 256
"""What cuMemAlloc promises, and kernels may have been compiled for."""

TAIL = 256
"""Bytes at the arena's end that belong to nobody: an address one past the end of the last buffer stays inside."""


def check_plan(traced: Lowered, plan: Plan) -> None:
    """Raises arena-overlap when two temporaries share bytes while both are needed, place-invalid when one has no aligned place inside
    the arena."""
    _check_places(traced, plan)
    needed = _needed(traced)
    leaving: list[tuple[int, int]] = []  # (last event, buffer) of who is in memory, as a heap
    memory: list[tuple[int, int]] = []  # (offset, buffer) of the same, sorted; their ranges are apart
    for buffer, (start, end) in sorted(needed.items(), key=lambda item: (item[1][0], item[0])):
        size = traced.buffers[buffer].nbytes
        if not size:
            continue
        while leaving and leaving[0][0] < start:
            gone = heappop(leaving)[1]
            del memory[bisect_left(memory, (plan.offsets[gone], gone))]
        offset = plan.offsets[buffer]
        at = bisect_left(memory, (offset, buffer))
        if at and memory[at - 1][0] + traced.buffers[memory[at - 1][1]].nbytes > offset:
            raise BuildError("arena-overlap", _overlap(traced, plan, memory[at - 1][1], buffer, start, needed))
        if at < len(memory) and offset + size > memory[at][0]:
            raise BuildError("arena-overlap", _overlap(traced, plan, memory[at][1], buffer, start, needed))
        insort(memory, (offset, buffer))
        heappush(leaving, (end, buffer))


def _check_places(traced: Lowered, plan: Plan) -> None:
    for i, buffer in enumerate(traced.buffers):
        if buffer.kind != TEMPORARY:
            if i in plan.offsets:
                raise BuildError(
                    "place-invalid", f"int_key {traced.key}: buffer {i} ({buffer.kind} {buffer.name}) has a place in the arena"
                )
            continue
        offset = plan.offsets.get(i, -1)
        if offset < 0 or offset % ALIGNMENT:
            what = "no place in the arena" if i not in plan.offsets else f"offset {offset}, no multiple of {ALIGNMENT}"
            raise BuildError("place-invalid", f"int_key {traced.key}: buffer {i} ({buffer.name}) has {what}")
    for i in _needed(traced):
        buffer = traced.buffers[i]
        if i in plan.offsets and plan.offsets[i] + buffer.nbytes + TAIL > plan.arena:
            raise BuildError(
                "place-invalid",
                f"int_key {traced.key}: buffer {i} ({buffer.name}), {buffer.nbytes} bytes at {plan.offsets[i]}, does not lie "
                f"inside the arena of {plan.arena} bytes, of which the last {TAIL} are nobody's",
            )


def _needed(traced: Lowered) -> dict[int, tuple[int, int]]:
    """Temporary -> (first event that names it, last one)."""
    found: dict[int, tuple[int, int]] = {}

    def name(place: Pointer, moment: int) -> None:
        if traced.buffers[place.buffer].kind == TEMPORARY:
            found[place.buffer] = (found.get(place.buffer, (moment, moment))[0], moment)

    for moment, event in enumerate(traced.events):
        if isinstance(event, Launch):
            for argument in event.arguments:
                if isinstance(argument, Pointer):
                    name(argument, moment)
        elif isinstance(event, Copy):
            name(event.source, moment)
            name(event.target, moment)
        elif isinstance(event, Fill):
            name(event.target, moment)
        elif isinstance(event, HostRead):
            name(Pointer(buffer=event.buffer, offset=0), moment)
    for output in traced.outputs:
        name(output.pointer, len(traced.events))
    return found


def _overlap(traced: Lowered, plan: Plan, old: int, new: int, moment: int, needed: dict[int, tuple[int, int]]) -> str:
    event = traced.events[moment] if moment < len(traced.events) else None
    what = (
        traced.variants[event.variant].name if isinstance(event, Launch) else type(event).__name__.lower() if event else "the end"
    )
    until = needed[old][1]
    sides = [f"buffer {i} ({traced.buffers[i].name}, {traced.buffers[i].nbytes} bytes at {plan.offsets[i]})" for i in (new, old)]
    return f"int_key {traced.key}, event {moment} ({what}): {sides[0]} lies over {sides[1]}, which is needed " + (
        "at the end" if until == len(traced.events) else f"until event {until}"
    )
