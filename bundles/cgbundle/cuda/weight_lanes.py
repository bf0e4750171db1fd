"""Weights in the page cache on their way to the GPU by lanes: threads of the C library read them into slots of pinned memory, and
the thread that runs this sends them on.  It alone needs the interpreter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from ..session.async_reads import AsyncReads
from .driver import check, cu
from .weight_pieces import Piece, place
from .weight_slots import HUGE, Slot, new_slot, pin, staging

ROWS, QUEUED = 3, 2
"""Slots of a lane; so many are read one after the other, while what the others hold travels.  On an H100's host twelve lanes
of 2 MB sent 45 GB/s, with four slots of which three are read 38, and fifteen lanes, which leave no processor to others, 40."""


def send_by_lanes(
    reads: AsyncReads,
    groups: Sequence[Sequence[Piece]],
    chunk: int,
    send: Callable[[Slot, Sequence[Piece]], None],
    cleanup: ExitStack,
) -> Iterator[None]:
    """Reads every group, of at most `chunk` bytes, and hands it to `send`; comes back behind each.  The first row of slots is read
    while the next one is pinned.  At the end all has been sent, and `cleanup` waits until it is there.  Raises as `reads` does,
    driver-failed."""
    lanes, left, query = range(reads.lanes), iter(groups), cu.held("cuStreamQuery")
    width = -(-chunk * reads.lanes // HUGE) * HUGE  # what is pinned at a time shares no page with the next
    memory = staging(width * ROWS, cleanup, pages=True)
    cleanup.callback(reads.close)  # before the memory goes
    slots: list[list[Slot]] = [[] for _ in lanes]
    reading: list[deque[tuple[Slot, Sequence[Piece]]]] = [deque() for _ in lanes]

    def ask(lane: int, into: Slot) -> None:
        if (group := next(left, None)) is not None:
            reads.begin(lane, into.address, *place(group))
            reading[lane].append((into, group))

    for number in range(ROWS):
        row = memory[number * width :][:width]
        pin(row, cleanup)
        for lane in lanes:
            slots[lane].append(new_slot(row[lane * chunk :][:chunk], cleanup))
            if number < QUEUED:
                ask(lane, slots[lane][number])
    turns = [QUEUED] * reads.lanes
    while any(reading):
        sent = False
        for lane in lanes:
            while reading[lane] and reads.take(lane):
                send(*reading[lane].popleft())
                sent, free = True, slots[lane][turns[lane] % ROWS]
                turns[lane] += 1
                if query(free.stream):
                    check("cuStreamSynchronize", cu.cuStreamSynchronize(free.stream), "weights")
                ask(lane, free)
                yield
        if not sent:
            reads.wait()
