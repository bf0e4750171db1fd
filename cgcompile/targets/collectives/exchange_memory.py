"""The memory through which the ranks of a model exchange data.  Each rank has one exchange memory, and all ranks can write to it.

It contains, in this order:

    epochs   per block: how many collectives this rank has run.  Each collective adds 1, on all ranks alike
    status   0, or 1 + the rank for which a kernel of this rank waited until the time limit
    limit    the time limit of a kernel's waits in nanoseconds, 0 for none
    flags    per source and block: the last epoch whose data the source has stored for this rank
    packets  two halves, per half and source: 8 bytes of data per packet of 16 bytes, with the epoch twice
    buffers  two halves, per half and source: plain data

A collective of an odd epoch uses the second half, one of an even epoch the first.  Two halves suffice.  A rank that begins epoch
e + 2 has received epoch e + 1 from every other rank.  A rank sends epoch e + 1 only after all its reads of epoch e.
Epochs have 32 bits.  Before 2^31 collectives, the memory must be filled with zeros on all ranks while no collective runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from cgbundle.validate.manifest import WORLDS as WORLDS

BLOCKS = 256
"""The largest number of blocks of a collective's kernel."""

LINE = 32
"""Bytes between flags.  Two flags never share a sector."""

STATUS, LIMIT, FLAGS = 4 * BLOCKS, 4 * BLOCKS + 8, 4096
"""Offsets that do not depend on the number of ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeMemory:
    """`packets`, `buffers`: the largest number of bytes that a rank sends to another in one collective by this method, multiples of
    16."""

    world: int
    packets: int
    buffers: int

    def flag(self, source: int, block: int) -> int:
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
        """Bytes that each rank allocates, and fills with zeros before the first collective of any rank."""
        return self.buffers_at + 2 * self.buffers_half
