"""Counts the 8-byte words of kernel parameters by kind (`Census`), from two recordings of the same graphs."""

from __future__ import annotations

from dataclasses import dataclass

from cgcompile.capture.pairing import pair_takes
from cgcompile.capture.relocation import address_at, classify_graph
from cgcompile.capture.take import RawGraph, RawKernel, Take


@dataclass(frozen=True, kw_only=True, slots=True)
class Census:
    """Number of 8-byte words of each kind in all parameter blocks. `one_sided` counts undefined words that were an address in only
    one recording. `shifted` counts relocations whose address differed between the two.
    """

    words: int
    relocations: int
    constants: int
    undefined: int
    one_sided: int
    shifted: int


def count(a: Take, b: Take) -> list[Census]:
    """Returns one census for each graph."""
    paired = pair_takes(a, b)
    return [_count(x, y, paired) for x, y in zip(a.graphs, b.graphs, strict=True)]


def _count(x: RawGraph, y: RawGraph, paired: object) -> Census:
    words = relocations = undefined = one_sided = shifted = 0
    for i, block in classify_graph(x, y, paired).items():  # type: ignore[arg-type]
        m, n = x.nodes[i], y.nodes[i]
        assert isinstance(m, RawKernel) and isinstance(n, RawKernel)
        at = {at for at, _ in block.relocations}
        undefined_at = {8 * (at // 8) for start, size in block.undefined for at in range(start, start + size)}
        words += -(-len(m.block.data) // 8)
        relocations += len(block.relocations)
        undefined += len(undefined_at)
        one_sided += len(({w.at for w in m.block.words} ^ {w.at for w in n.block.words}) & undefined_at)
        shifted += sum(address_at(m.block, offset) != address_at(n.block, offset) for offset in at)
    constants = words - relocations - undefined
    return Census(
        words=words, relocations=relocations, constants=constants, undefined=undefined, one_sided=one_sided, shifted=shifted
    )
