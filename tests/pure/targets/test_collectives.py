"""The kernels of collectives, as PTX, run on the CPU by several ranks side by side, in any order."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from cgcompile.targets.kernels.collectives import Combine, Way
from cgcompile.targets.kernels.exchange_memory import ExchangeMemory

SUMS: tuple[Combine, ...] = ("bfloat16", "float16", "float32")
WORLD = 3
MEMORIES = {world: ExchangeMemory(world=world, packets=64, buffers=128) for world in (2, WORLD)}


@dataclass(frozen=True)
class Collective:
    """`scattered`: each rank gets a piece of its own.  `count`: pieces that each gets.  `sender`: the one that sends, -1: all."""

    way: Way
    combine: Combine
    scattered: bool
    count: int
    blocks: int
    threads: int
    sender: int = -1


@st.composite
def collectives(draw: st.DrawFn, world: int) -> Collective:
    way: Way = draw(st.sampled_from(("packets", "buffers")))
    combine: Combine = draw(st.sampled_from((*SUMS, "side by side")))
    one = way == "buffers" and combine == "side by side" and draw(st.booleans())
    return Collective(
        way, combine, draw(st.booleans()), draw(st.integers(1, 8)), draw(st.integers(1, 3)), draw(st.integers(world, world + 2)),
        draw(st.integers(0, world - 1)) if one else -1,
    )  # fmt: skip
