"""Checks an arena plan.  Derives the lifetimes only from the uses of buffers, without the module `arena` and the events Allocate
and Release.  Pure.  A buffer is needed from the first event that uses it to the last, an output to the end.  If events inside and
outside a loop use a buffer, it is needed through the whole loop.  Two buffers that are needed at the same event must not share a
byte."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush

from ...errors import BuildError
from ..lowered import TEMPORARY, Begin, Copy, End, Exchange, Fill, HostRead, Launch, Lowered, Pointer, SetCondition
from .arena import Plan

ALIGNMENT = 256
"""The alignment that cuMemAlloc guarantees and kernels may rely on."""

TAIL = 256
"""Unused bytes at the arena's end: an address one past the end of the last buffer is still inside."""


def check_plan(lowered: Lowered, plan: Plan) -> None:
    """Raises arena-overlap if two temporaries that are needed together share bytes, and place-invalid if one is not aligned or not
    inside the arena."""
    _check_places(lowered, plan)
    needed = _needed(lowered)
    leaving: list[tuple[int, int]] = []  # (last event, buffer) of the live buffers, as a heap
    memory: list[tuple[int, int]] = []  # (offset, buffer) of the live buffers, sorted; their ranges are disjoint
    for buffer, (start, end) in sorted(needed.items(), key=lambda item: (item[1][0], item[0])):
        size = lowered.buffers[buffer].nbytes
        if not size:
            continue
        while leaving and leaving[0][0] < start:
            released = heappop(leaving)[1]
            del memory[bisect_left(memory, (plan.offsets[released], released))]
        offset = plan.offsets[buffer]
        position = bisect_left(memory, (offset, buffer))
        if position and memory[position - 1][0] + lowered.buffers[memory[position - 1][1]].nbytes > offset:
            raise _overlap(lowered, plan, memory[position - 1][1], buffer, start, needed)
        if position < len(memory) and offset + size > memory[position][0]:
            raise _overlap(lowered, plan, memory[position][1], buffer, start, needed)
        insort(memory, (offset, buffer))
        heappush(leaving, (end, buffer))


def _check_places(lowered: Lowered, plan: Plan) -> None:
    needed = _needed(lowered)
    for i, buffer in enumerate(lowered.buffers):
        what, offset = "", plan.offsets.get(i)
        if buffer.kind != TEMPORARY:
            what = "" if offset is None else f" ({buffer.kind} {buffer.name}) has a place in the arena"
        elif offset is None or offset < 0 or offset % ALIGNMENT:
            where = "no place in the arena" if offset is None else f"offset {offset}, no multiple of {ALIGNMENT}"
            what = f" ({buffer.name}) has {where}"
        elif i in needed and offset + buffer.nbytes + TAIL > plan.arena:
            what = (
                f" ({buffer.name}), {buffer.nbytes} bytes at {offset}, does not lie inside the arena of {plan.arena} bytes, "
                f"of which the last {TAIL} bytes must stay unused"
            )
        if what:
            raise BuildError("place-invalid", f"int_key {lowered.key}: buffer {i}{what}")


def _needed(lowered: Lowered) -> dict[int, tuple[int, int]]:
    """Temporary -> (first event that needs it, last event)."""
    spans: dict[int, tuple[int, int]] = {}
    opened: list[int] = []
    loops: list[tuple[int, int]] = []
    for moment, event in enumerate(lowered.events):
        named: list[int] = []
        match event:
            case Launch(arguments=arguments):
                named = [argument.buffer for argument in arguments if isinstance(argument, Pointer)]
            case Copy(source=source, target=target) | Exchange(source=source, target=target):
                named = [source.buffer, target.buffer]
            case Fill(target=target):
                named = [target.buffer]
            case HostRead(buffer=buffer):
                named = [buffer]
            case SetCondition(byte=byte):
                named = [byte.buffer]
        for index in named:
            spans[index] = spans.get(index, (moment, moment))[0], moment
        if isinstance(event, Begin):
            opened.append(moment)
        elif isinstance(event, End):
            begin = opened.pop()
            if lowered.events[begin] == Begin(conditional=event.conditional, type="while"):
                loops.append((begin, moment))
    for output in lowered.outputs:
        end, index = len(lowered.events), output.pointer.buffer
        spans[index] = spans.get(index, (end, end))[0], end
    for index, (start, end) in spans.items():
        for begin, stop in loops:  # inner loops come before outer ones
            crosses = (start < begin) != (end < begin) or (start > stop) != (end > stop)
            if crosses and (begin <= start <= stop or begin <= end <= stop):
                start, end = min(start, begin), max(end, stop)
        spans[index] = start, end
    return {temporary: moments for temporary, moments in spans.items() if lowered.buffers[temporary].kind == TEMPORARY}


def _overlap(lowered: Lowered, plan: Plan, old: int, new: int, moment: int, needed: dict[int, tuple[int, int]]) -> BuildError:
    event = lowered.events[moment] if moment < len(lowered.events) else None
    if isinstance(event, Launch):
        what = lowered.variants[event.variant].name
    else:
        what = type(event).__name__.lower() if event else "the end"
    until = "at the end" if needed[old][1] == len(lowered.events) else f"until event {needed[old][1]}"
    sides = [f"buffer {i} ({lowered.buffers[i].name}, {lowered.buffers[i].nbytes} bytes at {plan.offsets[i]})" for i in (new, old)]
    where = f"int_key {lowered.key}, event {moment} ({what})"
    return BuildError("arena-overlap", f"{where}: {sides[0]} overlaps {sides[1]}, which is needed {until}")
