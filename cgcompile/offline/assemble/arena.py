"""Where the temporaries of a traced program lie in memory `arena`: the offsets of an interval packing.  Pure; sizes in bytes.

Nodes of a graph run one after the other, so two temporaries may share bytes when one's last use comes before the other's first.
The largest sum of sizes that are live at one moment is a lower bound of any arena.  Finding the smallest arena is NP-hard (dynamic
storage allocation); here a few orders are placed greedily, which on real programs meets the bound, and what is left above it is
lowered by moving those buffers to the front that ended up on top.  No clock and no chance: the same program gets the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ...errors import BuildError
from ...targets.memory_layout import PAD, align
from ..traced import TEMPORARY, Allocate, Copy, Fill, Launch, Place, Read, Release, Traced

WORK = 3_000_000
"""Comparisons of two buffers that planning may make before it stops to look for a smaller arena: about a second."""

ROUNDS = 200
"""Times that the best order is changed, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """`offsets`: position in `Traced.buffers` -> offset in memory `arena`, of every temporary, multiples of 256.  `arena`: bytes
    that the program needs of it, PAD included.  `bound`: the largest sum of aligned sizes that are live at one moment."""

    offsets: Mapping[int, int]
    arena: int
    bound: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """A buffer's aligned `size`, and the positions in `Traced.events` of its first and last use, both included."""

    buffer: int
    size: int
    first: int
    last: int


def plan(traced: Traced) -> Plan:
    """Place every temporary.  A buffer lives from its first use to its last, an output to the end.

    Empty and unused temporaries lie at offset 0.  Raises lifetime-broken when a buffer is used before Allocate or after Release.
    """
    offsets = {i: 0 for i, buffer in enumerate(traced.buffers) if buffer.kind == TEMPORARY}
    lives = lifetimes(traced)
    bound = largest_sum(lives)
    found, height = _pack(lives, bound)
    offsets.update(zip((life.buffer for life in lives), found, strict=True))
    return Plan(offsets=offsets, arena=height + PAD, bound=bound)


def lifetimes(traced: Traced) -> tuple[Life, ...]:
    """The lives of all temporaries that are used and not empty, by first use.  Raises lifetime-broken."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    allocated: set[int] = set()
    released: set[int] = set()
    for moment, event in enumerate(traced.events):
        if isinstance(event, Allocate):
            if event.buffer in allocated or event.buffer in first:
                why = "a second time" if event.buffer in allocated else "after its first use"
                raise BuildError(
                    "lifetime-broken", f"int_key {traced.key}, event {moment}: {_name(traced, event.buffer)} is allocated {why}"
                )
            allocated.add(event.buffer)
        elif isinstance(event, Release):
            released.add(event.buffer)
        else:
            for buffer in uses(event):
                if buffer in released:
                    raise BuildError(
                        "lifetime-broken",
                        f"int_key {traced.key}, event {moment}: {_name(traced, buffer)} is used after its release",
                    )
                first.setdefault(buffer, moment)
                last[buffer] = moment
    for output in traced.outputs:
        first.setdefault(output.place.buffer, len(traced.events))
        last[output.place.buffer] = len(traced.events)
    lives = [
        Life(buffer=i, size=align(traced.buffers[i].nbytes), first=first[i], last=last[i])
        for i in first
        if traced.buffers[i].kind == TEMPORARY and traced.buffers[i].nbytes
    ]
    return tuple(sorted(lives, key=lambda life: (life.first, life.buffer)))


def uses(event: Launch | Copy | Fill | Read) -> Iterator[int]:
    """The buffers that an event reads or writes, by position."""
    if isinstance(event, Launch):
        yield from (argument.buffer for argument in event.arguments if isinstance(argument, Place))
    elif isinstance(event, Copy):
        yield from (event.source.buffer, event.target.buffer)
    elif isinstance(event, Fill):
        yield event.target.buffer
    else:
        yield event.buffer


def largest_sum(lives: Iterable[Life]) -> int:
    """The largest sum of sizes that are live at one moment."""
    return max(_sums(sorted(lives, key=lambda life: life.first)), default=0)


def _sums(lives: Sequence[Life]) -> Iterator[int]:
    """What is live at the first use of each buffer; `lives` by first use."""
    ends: list[tuple[int, int]] = []
    total = 0
    for life in lives:
        while ends and ends[0][0] < life.first:
            total -= heappop(ends)[1]
        heappush(ends, (life.last, life.size))
        total += life.size
        yield total


def _name(traced: Traced, buffer: int) -> str:
    return f"buffer {buffer} ({traced.buffers[buffer].kind} {traced.buffers[buffer].name})"


# --- packing --------------------------------------------------------------------------------------------------

Order = list[int]
"""Positions of lives: who is placed first."""

Gap = Callable[[Sequence[tuple[int, int]], int], int]
"""(taken ranges by offset, size) -> the offset of a range of that size."""


def _pack(lives: Sequence[Life], bound: int) -> tuple[list[int], int]:
    """Offsets in the order of `lives`, and the end of the highest."""
    meets = _meetings(lives)
    cost = sum(map(len, meets)) + len(lives)
    left = max(WORK // max(cost, 1), 1)
    best: tuple[int, list[int], Order, Gap] | None = None
    for order in _orders(lives):
        for gap in (_lowest_gap, _tightest_gap):
            if left <= 0:
                break
            left -= 1
            offsets, height = _place(lives, meets, order, gap)
            if best is None or height < best[0]:
                best = (height, offsets, order, gap)
            if height <= bound:
                return offsets, height
    assert best is not None  # `left` began at 1 at least
    return _improve(lives, meets, bound, best, min(left, ROUNDS))


def _improve(
    lives: Sequence[Life], meets: Sequence[Sequence[int]], bound: int, best: tuple[int, list[int], Order, Gap], rounds: int
) -> tuple[list[int], int]:
    """Move those who ended up on top to the front of the order, again and again; keep the lowest."""
    height, offsets, order, gap = best
    current, seen = order, {tuple(order)}
    at, top = offsets, height
    for _ in range(rounds):
        if height <= bound:
            break
        high = [i for i in range(len(lives)) if at[i] + lives[i].size == top]
        current = high + [i for i in current if at[i] + lives[i].size != top]
        if tuple(current) in seen:  # it would go round: start again, with who lies below the top as well
            under = {j for i in high for j in meets[i] if at[j] + lives[j].size == at[i]}
            current = sorted(under) + [i for i in current if i not in under]
            if tuple(current) in seen:
                break
        seen.add(tuple(current))
        at, top = _place(lives, meets, current, gap)
        if top < height:
            height, offsets = top, at
    return offsets, height


def _meetings(lives: Sequence[Life]) -> list[list[int]]:
    """Of each life, the others that are live at one moment with it; `lives` by first use."""
    meets: list[list[int]] = [[] for _ in lives]
    live: list[int] = []
    for i, life in enumerate(lives):
        live = [j for j in live if lives[j].last >= life.first]
        for j in live:
            meets[j].append(i)
        meets[i].extend(live)
        live.append(i)
    return meets


def _orders(lives: Sequence[Life]) -> Iterator[Order]:
    """The orders to try, those that were best on real programs first.  Ties go by first use."""
    count = range(len(lives))

    def by(rank: Callable[[Life], tuple[int, ...]]) -> Order:
        return sorted(count, key=lambda i: (*rank(lives[i]), i))

    yield by(lambda x: (-x.size, x.first - x.last))
    yield by(lambda x: (-x.size * (x.last - x.first + 1),))
    yield by(lambda x: (x.first - x.last, -x.size))
    yield by(lambda x: (x.first, -x.size))
    yield by(lambda x: (-x.last, -x.size))
    pressure = _pressure(lives)
    yield sorted(count, key=lambda i: (-pressure[i], -lives[i].size, i))
    yield sorted(count, key=lambda i: (-pressure[i], lives[i].first - lives[i].last, i))


def _pressure(lives: Sequence[Life]) -> list[int]:
    """Of each life, the largest sum of sizes that it is part of (at first uses, which is where sums grow)."""
    sums = list(_sums(lives))
    result = []
    for i, life in enumerate(lives):
        most = sums[i]
        for j in range(i + 1, len(lives)):
            if lives[j].first > life.last:
                break
            most = max(most, sums[j])
        result.append(most)
    return result


def _place(lives: Sequence[Life], meets: Sequence[Sequence[int]], order: Order, gap: Gap) -> tuple[list[int], int]:
    """Give each life in turn a range that no earlier one holds at any of its moments."""
    offsets = [-1] * len(lives)
    height = 0
    for i in order:
        taken = sorted([(offsets[j], offsets[j] + lives[j].size) for j in meets[i] if offsets[j] >= 0])
        offsets[i] = gap(taken, lives[i].size)
        height = max(height, offsets[i] + lives[i].size)
    return offsets, height


def _lowest_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    free = 0
    for start, end in taken:
        if start - free >= size:
            return free
        free = max(free, end)
    return free


def _tightest_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    free, best, room = 0, -1, 0
    for start, end in taken:
        if start - free >= size and (best < 0 or start - free < room):
            best, room = free, start - free
        free = max(free, end)
    return best if best >= 0 else free
