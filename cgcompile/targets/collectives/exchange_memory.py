"""The memory through which the ranks of a model exchange data: on every rank one, which all of them can write to.  Pure.

It holds, in this order:

    epochs   a number per block: how many collectives this rank has run.  It grows by one with each, on all ranks alike
    status   0, or 1 + the rank that a kernel of this rank has waited for in vain
    limit    the nanoseconds that a kernel waits, 0: for ever
    flags    per source and block: the epoch up to which the source has written what it sends to this rank
    packets  two halves, per half and source: data in pieces of 8 bytes, each beside its epoch twice (16 bytes)
    buffers  two halves, per half and source: data as it is

A collective of an odd epoch uses the second half, one of an even epoch the first.  That is enough: a rank that begins epoch e + 2
has heard from every other one in epoch e + 1, and that one had begun e + 1 only when all of its reads of epoch e were done.
Numbers of epochs have 32 bits: after 2^31 collectives a memory is filled with zeros again, on all ranks at rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from cgbundle.validate.manifest import WORLDS as WORLDS

BLOCKS = 256
"""The most blocks that a collective's kernel is launched with."""

LINE = 32
"""Bytes between flags, so that no two of them share a sector."""

STATUS, LIMIT, FLAGS = 4 * BLOCKS, 4 * BLOCKS + 8, 4096
"""Offsets that are the same for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeMemory:
    """`packets` and `buffers`: the most bytes that one rank sends to another by either way in one collective, multiples of 16."""

    world: int
    packets: int
    buffers: int

    def flag(self, source: int, block: int) -> int:
        """The offset of a flag."""
        return FLAGS + (source * BLOCKS + block) * LINE

    @property
    def packets_at(self) -> int:
        """The offset of the first half's packets of source 0."""
        return FLAGS + self.world * BLOCKS * LINE

    @property
    def packets_half(self) -> int:
        """Bytes of one half of the packets."""
        return 2 * self.packets * self.world

    @property
    def buffers_at(self) -> int:
        """The offset of the first half's buffers of source 0."""
        return self.packets_at + 2 * self.packets_half

    @property
    def buffers_half(self) -> int:
        """Bytes of one half of the buffers."""
        return self.buffers * self.world

    @property
    def bytes(self) -> int:
        """What a rank has to allocate, and fill with zeros before the first collective of any rank."""
        return self.buffers_at + 2 * self.buffers_half
