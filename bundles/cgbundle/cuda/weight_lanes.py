"""Weights in the page cache on their way to the GPU by lanes: threads of the C library read them into slots of pinned memory, and
the thread that runs this sends them on.  It alone needs the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from ..session.async_reads import AsyncReads
from .driver import check, cu
from .weight_pieces import Piece, place
from .weight_slots import HUGE, Slot, new_slot, pin, staging

Reading = tuple[Slot, Sequence[Piece]]
"""What a lane reads, and into which of its two slots: the other one travels.  On an H200's host twelve lanes of 4 MB sent 45 to 47
GB/s; with three slots of 2 MB, two of them asked for, 42 to 45, since this thread has twice as much to do (a C program: 51)."""


def send_by_lanes(
    reads: AsyncReads,
    groups: Sequence[Sequence[Piece]],
    chunk: int,
    send: Callable[[Slot, Sequence[Piece]], None],
    cleanup: ExitStack,
) -> Iterator[None]:
    """Reads every group, of at most `chunk` bytes, and hands it to `send`; comes back behind each.  The first slots are read into
    while the others are pinned.  At the end all has been sent, and `cleanup` waits until it is there.  Raises as `reads` does,
    driver-failed."""
    lanes, left, query = range(reads.lanes), iter(groups), cu.held("cuStreamQuery")
    width = -(-chunk * reads.lanes // HUGE) * HUGE  # what is pinned at a time shares no page with the next
    memory = staging(width * 2, cleanup, pages=True)
    cleanup.callback(reads.close)  # before the memory goes

    def pinned(row: int) -> list[Slot]:
        half = memory[row * width :][:width]
        pin(half, cleanup)
        return [new_slot(half[lane * chunk :][:chunk], cleanup) for lane in lanes]

    def ask(lane: int, into: Slot) -> Reading | None:
        if (group := next(left, None)) is None:
            return None
        reads.begin(lane, into.address, *place(group))
        return into, group

    reading = [ask(lane, slot) for lane, slot in enumerate(pinned(0))]
    others = pinned(1)
    while any(reading):
        sent = False
        for lane in lanes:
            if (found := reading[lane]) is None or not reads.take(lane):
                continue
            send(*found)
            free, others[lane] = others[lane], found[0]
            if query(free.stream):
                check("cuStreamSynchronize", cu.cuStreamSynchronize(free.stream), "weights")
            reading[lane], sent = ask(lane, free), True
            yield
        if not sent:
            reads.wait()
