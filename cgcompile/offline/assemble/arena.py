"""The arena plan: offsets in memory `arena` of the temporaries of a lowered program.  Pure; sizes in bytes.

Two temporaries may share bytes when one's last use comes before the other's first.  The largest sum of sizes that are live at one
moment is a lower bound; the smallest arena is NP-hard to find (dynamic storage allocation).  A few orders placed greedily meet the
bound on real programs.  Above it, buffers that ended up on top move to the front of the order.  Equal programs get equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from types import MappingProxyType

from ...errors import BuildError
from ...targets.memory_layout import PAD, align
from ..lowered import (
    TEMPORARY,
    Allocate,
    Begin,
    Copy,
    End,
    Event,
    Exchange,
    Fill,
    Launch,
    Lowered,
    NextBody,
    Pointer,
    Release,
    SetCondition,
)

WORK = 3_000_000
"""Comparisons of two buffers after which planning looks no further for a smaller arena: about a second."""

ROUNDS = 200
"""Times that the best order is changed, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """`offsets`: position in `Lowered.buffers` -> offset in memory `arena`, of every temporary, multiples of 256.  `arena`: bytes
    that the program needs, PAD included.  `bound`: the largest sum of aligned sizes live at one moment, behind what is reserved."""

    offsets: Mapping[int, int]
    arena: int
    bound: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetime:
    """A buffer's aligned `size`; positions in `Lowered.events` of its first and last use, both included."""

    buffer: int
    size: int
    first: int
    last: int


def plan(lowered: Lowered, kept: Mapping[int, int] = MappingProxyType({}), start: int = 0) -> Plan:
    """Place every temporary, empty and unused ones at offset `start`.  It lives from its first use to its last, an output to the
    end.  `kept`: buffers that have an offset, below `start`, which none of the others gets.
    Raises lifetime-broken when a buffer is used before Allocate or after Release."""
    offsets = {i: start for i, buffer in enumerate(lowered.buffers) if buffer.kind == TEMPORARY}
    lives = [life for life in lifetimes(lowered) if life.buffer not in kept]
    bound = largest_sum(lives)
    packed_offsets, height = _pack(lives, bound)
    offsets.update({life.buffer: start + offset for life, offset in zip(lives, packed_offsets, strict=True)})
    return Plan(offsets=offsets | dict(kept), arena=start + height + PAD, bound=start + bound)


def lifetimes(lowered: Lowered) -> tuple[Lifetime, ...]:
    """The lives of all temporaries that are used and not empty, by first use.  Raises lifetime-broken.

    What is used inside a loop and outside of it lives through the whole loop: the next turn needs what this one had.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    allocated: set[int] = set()
    released: set[int] = set()
    for moment, event in enumerate(lowered.events):
        if isinstance(event, Allocate):
            if event.buffer in allocated or event.buffer in first:
                why = "a second time" if event.buffer in allocated else "after its first use"
                raise _broken(lowered, moment, event.buffer, f"allocated {why}")
            allocated.add(event.buffer)
        elif isinstance(event, Release):
            released.add(event.buffer)
        else:
            for buffer in uses(event):
                if buffer in released:
                    raise _broken(lowered, moment, buffer, "used after its release")
                first.setdefault(buffer, moment)
                last[buffer] = moment
    for output in lowered.outputs:
        first.setdefault(output.pointer.buffer, len(lowered.events))
        last[output.pointer.buffer] = len(lowered.events)
    for begin, end in loops(lowered):
        for buffer in first:
            if first[buffer] < begin < last[buffer] < end:
                last[buffer] = end
            elif begin < first[buffer] < end < last[buffer]:
                first[buffer] = begin
    lives = [
        Lifetime(buffer=i, size=align(lowered.buffers[i].nbytes), first=first[i], last=last[i])
        for i in first
        if lowered.buffers[i].kind == TEMPORARY and lowered.buffers[i].nbytes
    ]
    return tuple(sorted(lives, key=lambda life: (life.first, life.buffer)))


def loops(lowered: Lowered) -> list[tuple[int, int]]:
    """Positions of the beginning and the end of every loop, those inside of others first."""
    begins: dict[int, int] = {}
    spans = []
    for moment, event in enumerate(lowered.events):
        if isinstance(event, Begin) and event.type == "while":
            begins[event.conditional] = moment
        elif isinstance(event, End) and event.conditional in begins:
            spans.append((begins.pop(event.conditional), moment))
    return spans


def uses(event: Event) -> Iterator[int]:
    """The buffers that an event reads or writes, by position."""
    if isinstance(event, Launch):
        yield from (argument.buffer for argument in event.arguments if isinstance(argument, Pointer))
    elif isinstance(event, Copy | Exchange):
        yield from (event.source.buffer, event.target.buffer)
    elif isinstance(event, Fill):
        yield event.target.buffer
    elif isinstance(event, SetCondition):
        yield event.byte.buffer
    elif not isinstance(event, Begin | NextBody | End):
        yield event.buffer


def largest_sum(lives: Iterable[Lifetime]) -> int:
    """The largest sum of sizes that are live at one moment."""
    return max(_sums(sorted(lives, key=lambda life: life.first)), default=0)


def _sums(lives: Sequence[Lifetime]) -> Iterator[int]:
    """What is live at the first use of each buffer; `lives` by first use."""
    ends: list[tuple[int, int]] = []
    total = 0
    for life in lives:
        while ends and ends[0][0] < life.first:
            total -= heappop(ends)[1]
        heappush(ends, (life.last, life.size))
        total += life.size
        yield total


def _broken(lowered: Lowered, moment: int, buffer: int, what: str) -> BuildError:
    row = lowered.buffers[buffer]
    text = f"int_key {lowered.key}, event {moment}: buffer {buffer} ({row.kind} {row.name}) is {what}"
    return BuildError("lifetime-broken", text)


# --- packing --------------------------------------------------------------------------------------------------

Order = list[int]
"""Positions of lives: who is placed first."""

Gap = Callable[[Sequence[tuple[int, int]], int], int]
"""(taken ranges by offset, size) -> the offset of a range of that size."""


def _pack(lives: Sequence[Lifetime], bound: int) -> tuple[list[int], int]:
    """Offsets in the order of `lives`, and the end of the highest."""
    meets = _meetings(lives)
    cost = sum(map(len, meets)) + len(lives)
    left = max(WORK // max(cost, 1), 1)
    best: tuple[int, list[int], Order, Gap] | None = None
    for order in _orders(lives):
        for gap in (lowest_gap, tightest_gap):
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
    lives: Sequence[Lifetime], meets: Sequence[Sequence[int]], bound: int, best: tuple[int, list[int], Order, Gap], rounds: int
) -> tuple[list[int], int]:
    """Move the buffers on top to the front of the order, again and again; keep the lowest plan."""
    height, offsets, order, gap = best
    current, seen = order, {tuple(order)}
    at, top = offsets, height
    for _ in range(rounds):
        if height <= bound:
            break
        high = [i for i in range(len(lives)) if at[i] + lives[i].size == top]
        current = high + [i for i in current if at[i] + lives[i].size != top]
        if tuple(current) in seen:  # a cycle: start again, with those below the top as well
            under = {j for i in high for j in meets[i] if at[j] + lives[j].size == at[i]}
            current = sorted(under) + [i for i in current if i not in under]
            if tuple(current) in seen:
                break
        seen.add(tuple(current))
        at, top = _place(lives, meets, current, gap)
        if top < height:
            height, offsets = top, at
    return offsets, height


def _meetings(lives: Sequence[Lifetime]) -> list[list[int]]:
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


def _orders(lives: Sequence[Lifetime]) -> Iterator[Order]:
    """The orders to try, those that were best on real programs first.  Ties go by first use."""
    count = range(len(lives))

    def by(rank: Callable[[Lifetime], tuple[int, ...]]) -> Order:
        return sorted(count, key=lambda i: (*rank(lives[i]), i))

    yield by(lambda x: (-x.size, x.first - x.last))
    yield by(lambda x: (-x.size * (x.last - x.first + 1),))
    yield by(lambda x: (x.first - x.last, -x.size))
    yield by(lambda x: (x.first, -x.size))
    yield by(lambda x: (-x.last, -x.size))
    pressure = _pressure(lives)
    yield sorted(count, key=lambda i: (-pressure[i], -lives[i].size, i))
    yield sorted(count, key=lambda i: (-pressure[i], lives[i].first - lives[i].last, i))


def _pressure(lives: Sequence[Lifetime]) -> list[int]:
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


def _place(lives: Sequence[Lifetime], meets: Sequence[Sequence[int]], order: Order, gap: Gap) -> tuple[list[int], int]:
    """Give each buffer in order a range that none before it holds during its lifetime."""
    offsets = [-1] * len(lives)
    height = 0
    for i in order:
        taken = sorted([(offsets[j], offsets[j] + lives[j].size) for j in meets[i] if offsets[j] >= 0])
        offsets[i] = gap(taken, lives[i].size)
        height = max(height, offsets[i] + lives[i].size)
    return offsets, height


def lowest_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """The lowest offset at which `size` bytes overlap none of the ranges (begin, end), which are sorted."""
    free = 0
    for start, end in taken:
        if start - free >= size:
            return free
        free = max(free, end)
    return free


def tightest_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """The beginning of the smallest gap that holds `size` bytes, the lowest of equal ones; the end of all ranges without one."""
    free, best, size_of_best = 0, -1, 0
    for start, end in taken:
        if start - free >= size and (best < 0 or start - free < size_of_best):
            best, size_of_best = free, start - free
        free = max(free, end)
    return best if best >= 0 else free
