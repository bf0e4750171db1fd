"""Maps an address of this process to places in known memory.  Pure, except that `probe` asks the driver about other addresses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace

from cgbundle.format.schema import IntKey

from ..take import Block, Pointee, Range, Reading, Word

LOWEST, HIGHEST = 1 << 20, 1 << 57
"""Numbers outside these limits are data: no device address is below LOWEST, and none has more than 57 bits."""

Probe = Callable[[int], Pointee | None]


class AddressMap:
    """The known ranges of one process; `readings` adds ranges that the driver reports.  `owned`: torch's segments, (start, bytes).
    Their live blocks are ranges.  Any other number in a segment is data, because no captured kernel may use freed memory."""

    def __init__(self, ranges: Iterable[Range], owned: Iterable[tuple[int, int]], probe: Probe) -> None:
        self.ranges = list(ranges)
        self._probe = probe
        self._owned = sorted(owned)
        self._probed: dict[int, tuple[Reading, ...]] = {}
        self._order = sorted(range(len(self.ranges)), key=lambda i: self.ranges[i].start)
        self._starts = [self.ranges[i].start for i in self._order]
        self._ends: dict[int, list[int]] = {}
        for i, memory_range in enumerate(self.ranges):
            self._ends.setdefault(memory_range.start + memory_range.size, []).append(i)

    def readings(self, address: int, key: IntKey | None) -> tuple[Reading, ...]:
        """Returns every place that `address` can mean in a graph of `key`, the most likely first; () if it is no live address.
        Ignores private pools of other keys: their memory is not live while a graph of this key runs."""
        if not LOWEST <= address < HIGHEST:
            return ()
        inside = [Reading(range=i, offset=address - self.ranges[i].start) for i in self._inside(address)]
        ends = [Reading(range=i, offset=self.ranges[i].size) for i in self._ends.get(address, ())]
        usable = tuple(t for t in [*inside, *ends] if self.ranges[t.range].key in (None, key))
        if usable or inside or self._is_owned(address):  # not `ends`: a library's memory may begin where another key's pool ends
            return usable
        if address not in self._probed:
            self._probed[address] = self._probe_driver(address)
        return self._probed[address]

    def block(self, data: bytes, key: IntKey | None) -> Block:
        """Returns `data` with the readings of its 8-byte aligned words that are addresses."""
        words = []
        for at in range(0, len(data) - 7, 8):
            targets = self.readings(int.from_bytes(data[at : at + 8], "little"), key)
            if targets:
                words.append(Word(at=at, readings=targets))
        return Block(data=data, words=tuple(words))

    def known_words(self, data: bytes) -> tuple[Word, ...]:
        """Returns the 8-byte aligned words of a large block that point inside a known range, without asking the driver."""
        aligned = memoryview(data)[: len(data) // 8 * 8].cast("Q")
        low, high = self._starts[0], max(self._ends)
        words = []
        for i, value in enumerate(aligned):
            if low <= value <= high and (inside := self._inside(value)):
                words.append(Word(at=8 * i, readings=(Reading(range=inside[0], offset=value - self.ranges[inside[0]].start),)))
        return tuple(words)

    def fill(self, used: Iterable[int], read: Callable[[int, int], bytes], limit: int) -> tuple[Range, ...]:
        """Returns the ranges.  Those in `used` of kind "torch" or "device" with at most `limit` bytes have their contents."""
        tables = {i for i in used if self.ranges[i].kind in ("torch", "device") and self.ranges[i].size <= limit}
        return tuple(replace(r, contents=read(r.start, r.size)) if i in tables else r for i, r in enumerate(self.ranges))

    def _inside(self, address: int) -> list[int]:
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return []
        i = self._order[at]
        return [i] if address < self.ranges[i].start + self.ranges[i].size else []

    def _is_owned(self, address: int) -> bool:
        at = bisect_right(self._owned, (address, 1 << 62)) - 1
        return at >= 0 and address < self._owned[at][0] + self._owned[at][1]

    def _probe_driver(self, address: int) -> tuple[Reading, ...]:
        pointee = self._probe(address)
        if pointee is None:
            return ()
        memory_range = Range(kind=pointee.kind, start=pointee.start, size=pointee.size)
        if memory_range not in self.ranges:
            self.ranges.append(memory_range)
        return (
            Reading(
                range=self.ranges.index(memory_range), offset=address - memory_range.start if memory_range.kind == "device" else 0
            ),
        )
