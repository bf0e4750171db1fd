"""The kernels of collectives, as PTX, run on the CPU by several ranks at the same time, in any order."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgcompile.targets.collectives.exchange_memory import BLOCKS, LIMIT, STATUS, WORLDS, ExchangeMemory
from cgcompile.targets.collectives.kernels import PIECE, Combine, Way, params, source, symbol
from cgcompile.targets.collectives.launches import collective_launch
from tests.helpers.drivers.ptx import Launch, Memory, bfloat16, bits_of, float_of, parse, run

SUMS: tuple[Combine, ...] = ("bfloat16", "float16", "float32")
WORLD = 3
MEMORIES = {world: ExchangeMemory(world=world, packets=64, buffers=128) for world in (2, WORLD)}


@dataclass(frozen=True)
class Collective:
    """`scattered`: each rank gets its own piece. `count`: pieces for each rank. `sender`: the sending rank, -1 for all."""

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


Words = list[int]
"""Numbers of 32 bits."""


def drawn(random: Random, combine: Combine, words: int) -> Words:
    """Returns words of finite numbers of a dtype, so small that no sum overflows."""
    if combine == "float32":
        return [bits_of(random.uniform(-100, 100)) for _ in range(words)]
    if combine == "bfloat16":
        return [bfloat16(bits_of(random.uniform(-9, 9))) << 16 | bfloat16(bits_of(random.uniform(-9, 9))) for _ in range(words)]
    if combine == "float16":
        return [struct.unpack("<I", struct.pack("<2e", random.uniform(-9, 9), random.uniform(-9, 9)))[0] for _ in range(words)]
    return [random.getrandbits(32) for _ in range(words)]


def summed(combine: Combine, parts: Sequence[Words]) -> Words:
    """Returns the sums of numbers of a dtype: added in float32 in the order of `parts`, and rounded at the end."""
    totals = []
    for column in zip(*parts, strict=True):
        if combine == "float32":
            totals.append(added(column))
        elif combine == "bfloat16":
            low, high = added([word << 16 & 0xFFFFFFFF for word in column]), added([word & 0xFFFF0000 for word in column])
            totals.append(bfloat16(high) << 16 | bfloat16(low))
        else:
            halves = [struct.unpack("<2e", struct.pack("<I", word)) for word in column]
            sums = [float_of(added([bits_of(pair[place]) for pair in halves])) for place in range(2)]
            totals.append(struct.unpack("<I", struct.pack("<2e", *sums))[0])
    return totals


def added(column: Sequence[int]) -> int:
    total = column[0]
    for word in column[1:]:
        total = bits_of(float_of(total) + float_of(word))
    return total


def wanted(collective: Collective, inputs: Sequence[Words], rank: int) -> Words:
    """Returns the result of a collective on a rank."""
    words = collective.count * PIECE[collective.way] // 4
    first = words * rank if collective.scattered else 0
    parts = [rank_input[first : first + words] for rank_input in inputs]
    if collective.combine != "side by side":
        return summed(collective.combine, parts)
    return [word for rank, part in enumerate(parts) if collective.sender in (-1, rank) for word in part]


def packed(words: Words) -> bytes:
    return struct.pack(f"<{len(words)}I", *words)


def exchanged(
    world: int, listed: Sequence[Collective], seed: int, text: str = "", absent: int = -1
) -> tuple[list[list[bytes]], list[list[bytes]], Memory, list[int]]:
    """Returns the results and expected results by collective and rank, after all ranks but `absent` have run all collectives. Also
    returns the memory, and the start of each rank's exchange memory."""
    layout, memory, random = MEMORIES[world], Memory(), Random(seed)
    programs = parse(text or source(layout))
    bases = [memory.allocate(layout.bytes) for _ in range(world)]
    launches: list[list[Launch]] = [[] for _ in range(world)]
    outputs, right = [], []
    for collective in listed:
        piece = PIECE[collective.way]
        size = collective.count * piece
        inputs = [drawn(random, collective.combine, size // 4 * (world if collective.scattered else 1)) for _ in range(world)]
        places = []
        for rank in range(world):
            input_address, output_address = (
                memory.allocate(4 * len(inputs[rank])),
                memory.allocate(size * (world if collective.combine == "side by side" else 1)),
            )
            memory.write(input_address, packed(inputs[rank]))
            senders = 1 << collective.sender if collective.sender >= 0 else (1 << world) - 1
            stride = size if collective.scattered else 0
            values = (input_address, output_address, *bases, stride, collective.count, rank, senders)
            program = programs[symbol(collective.way, collective.combine)]
            launches[rank].append(Launch(program, collective.blocks, collective.threads, values))
            places.append(output_address)
        outputs.append(places)
        right.append([packed(wanted(collective, inputs, rank)) for rank in range(world)])
    if absent >= 0:
        launches[absent] = []
        for base in bases:
            memory.write(base + LIMIT, struct.pack("<Q", 5000))
    run(memory, launches, random, clock=count(1, 1000).__next__)
    came = [[memory.read(at, len(data)) for at, data in zip(*pair, strict=True)] for pair in zip(outputs, right, strict=True)]
    return came, right, memory, bases


@settings(max_examples=25)
@given(st.data(), st.sampled_from((2, WORLD)), st.integers(0, 1 << 32))
def test_any_collectives_in_any_order(data: st.DataObject, world: int, seed: int) -> None:
    listed = data.draw(st.lists(collectives(world), min_size=1, max_size=5))
    came, right, memory, bases = exchanged(world, listed, seed)
    assert came == right
    for base in bases:
        assert struct.unpack(f"<{BLOCKS}I", memory.read(base, 4 * BLOCKS)) == (len(listed),) * BLOCKS
        assert memory.read(base + STATUS, 4) == bytes(4)


@pytest.mark.parametrize("world", WORLDS)
def test_every_kernel_has_the_parameters_that_are_said(world: int) -> None:
    text = source(ExchangeMemory(world=world, packets=64, buffers=64))
    heads = re.findall(r"\.visible \.entry (\w+)\((.*?)\)", text)
    assert sorted(name for name, _ in heads) == sorted(symbol(way, combine) for way in PIECE for combine in (*SUMS, "side by side"))
    for _, head in heads:
        sizes = [int(bits) // 8 for bits in re.findall(r"\.param \.u(\d+)", head)]
        assert [size for _, size in params(world)] == sizes
        assert [at for at, _ in params(world)] == [sum(sizes[:place]) for place in range(len(sizes))]


@given(st.integers(1, 1 << 23))
def test_launches_have_room_for_every_piece(pieces: int) -> None:
    launch = collective_launch(16 * pieces)
    assert launch.count * PIECE[launch.way] == 16 * pieces
    assert 1 <= launch.blocks <= BLOCKS and max(WORLDS) <= launch.threads <= 1024
    assert launch.way == "buffers" or launch.blocks * launch.threads >= launch.count  # with one piece per thread, each waits once


def test_sizes_that_are_no_multiple_are_refused() -> None:
    for size in (0, 8, 24):
        with pytest.raises(ValueError, match="expected a multiple of 16"):
            collective_launch(size)


@pytest.mark.parametrize(
    ("way", "old", "new"),
    [
        ("buffers", "  fence.acq_rel.sys;", ""),
        ("buffers", "  and.b32 %half, %epoch, 1;", "  and.b32 %half, %epoch, 0;"),
        ("buffers", "  setp.ge.s32 %p, %g, 0;", "  setp.eq.u32 %p, 0, 0;"),
        ("packets", "  setp.eq.and.u32 %p, %g, %epoch, %p;", ""),
        ("packets", "  setp.eq.u32 %p, %f, %epoch;", "  setp.eq.u32 %p, %g, %epoch;"),
    ],
)
def test_a_protocol_that_lacks_something_is_seen(way: Way, old: str, new: str) -> None:
    text = source(MEMORIES[2])
    assert old in text
    for seed in range(100):
        came, right, *_ = exchanged(2, [Collective(way, "float32", False, 4, 2, 2)] * 4, seed, text.replace(old, new))
        if came != right:
            return
    pytest.fail("every run was right")


@pytest.mark.parametrize("way", ["packets", "buffers"])
def test_a_rank_that_is_not_there_is_named_and_nobody_hangs(way: Way) -> None:
    listed = [Collective(way, "float32", False, 2, 1, 3)] * 3
    came, right, memory, bases = exchanged(3, listed, 0, absent=1)
    status = [int.from_bytes(memory.read(base + STATUS, 4), "little") for base in bases]
    assert status == [2, 0, 2]
    assert came != right
