"""A donated output on a GPU stays unchanged until its own entry is called again, with the planners of both recorders. No more
memory is reserved for it than necessary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from cgbundle.format.schema import IntKey
from cgcompile.capture.placement import SEGMENT_ALIGN, keep, place
from cgcompile.capture.take import Range, Take
from cgcompile.offline.assemble.arena import plan
from cgcompile.offline.assemble.kept import keep_outputs
from cgcompile.offline.assemble.merge import whole
from cgcompile.offline.assemble.plan_check import check_plan
from cgcompile.offline.lowered import LoweredProgram
from cgcompile.targets.cuda.donations import DonatedOutput
from cgcompile.targets.memory_layout import PAD, align
from tests.helpers.raising import raises
from tests.pure.offline.test_arena import launch, traced
from tests.pure.offline.test_arena import place as at


class Placed(NamedTuple):
    """The parts of the arena that a program uses, as (begin, end), and those of its donated outputs."""

    pieces: list[tuple[int, int]]
    kept: list[tuple[int, int]]
    arena: int


def check_calls(programs: Mapping[IntKey, Placed], calls: list[IntKey]) -> None:
    """Simulates calls that write to all parts of their programs. The donated outputs of an entry (the first number of a key) must
    stay unchanged until its next call."""
    memory = [-1] * max(placed.arena for placed in programs.values())
    left: dict[int, tuple[int, list[tuple[int, int]]]] = {}
    for number, key in enumerate(calls):
        placed = programs[key]
        for begin, end in placed.pieces:
            assert end + PAD <= placed.arena
            memory[begin:end] = [number] * (end - begin)
        if placed.kept:
            left[key[0]] = number, placed.kept
        for writer, pieces in left.values():
            assert all(set(memory[begin:end]) <= {writer} for begin, end in pieces), (number, key, writer)


SIZES = st.integers(1, 700)


@given(st.data())
def test_traced(data: st.DataObject) -> None:
    programs: dict[IntKey, LoweredProgram] = {}
    donated: dict[IntKey, tuple[DonatedOutput, ...]] = {}
    for entry in range(data.draw(st.integers(1, 4))):
        count = data.draw(st.integers(0, 2))  # the number of donated outputs
        for size in range(data.draw(st.integers(1, 3))):
            sizes = data.draw(st.lists(SIZES, min_size=count + 1, max_size=count + 4))
            events = [launch(i, data.draw(st.integers(0, i))) for i in range(len(sizes))]
            outputs = data.draw(st.permutations(range(len(sizes))))[: count + 1]
            lowered = traced(sizes, events, outputs)
            programs[entry, size] = whole(lowered)
            if count:
                donated[entry, size] = tuple([DonatedOutput(entry=f"e{entry}", number=i, region=0, output=i) for i in range(count)])
    kept = keep_outputs(programs, donated)
    placed = {}
    for key, program in programs.items():
        lowered = program.lowered
        slots = plan(lowered, kept.offsets.get(key, {}), kept.start)
        check_plan(lowered, slots)
        pieces = [(offset, offset + lowered.buffers[i].nbytes) for i, offset in slots.offsets.items()]
        ids = [lowered.outputs[donation.output].pointer.buffer for donation in donated.get(key, ())]
        placed[key] = Placed(pieces, [(slots.offsets[i], slots.offsets[i] + lowered.buffers[i].nbytes) for i in ids], slots.arena)
    check_calls(placed, data.draw(st.lists(st.sampled_from(list(programs)), max_size=12)))
    assert [row.entry for row in kept.reserved] == list(dict.fromkeys(outputs[0].entry for outputs in donated.values()))
    for row in kept.reserved:
        needs = []
        for key, outputs in donated.items():
            lowered = programs[key].lowered
            held = {lowered.outputs[donation.output].pointer.buffer for donation in outputs}
            needs += [sum(align(lowered.buffers[i].nbytes) for i in held)] if outputs[0].entry == row.entry else []
        assert row.bytes == max(needs) + PAD
    if not donated:
        assert kept.start == 0


@given(st.data())
def test_captured(data: st.DataObject) -> None:
    ranges = [Range(kind=kind, start=0, size=4096) for kind in ("weights", "inputs", "state")]
    used: dict[IntKey, list[int]] = {}
    held: dict[IntKey, tuple[str, list[int]]] = {}
    for entry in range(data.draw(st.integers(1, 4))):
        keeps = data.draw(st.booleans())
        for size in range(data.draw(st.integers(1, 3))):
            key = (entry, size)
            indices = list(range(len(ranges), len(ranges) + data.draw(st.integers(1, 4))))
            ranges += [Range(kind="pool", start=0, size=data.draw(SIZES), key=key) for _ in indices]
            used[key] = [0, 1, *indices]
            if keeps:
                held[key] = f"e{entry}", data.draw(st.lists(st.sampled_from(indices), min_size=1, max_size=3))
    take = Take(ranges=tuple(ranges), graphs=(), states=(), self_tests=(), images={}, mutated=(), arch="", driver=0)
    kept = keep(take, held)
    placed = {}
    for key, pieces in used.items():
        placement = place(take, pieces, {}, key, kept.offsets.get(key, {}), kept.start)
        spans = {i: (placement.bases[i][1], placement.bases[i][1] + ranges[i].size) for i in pieces[2:]}
        apart = sorted(spans.values())
        assert all(one[1] <= other[0] for one, other in pairwise(apart))
        placed[key] = Placed(list(spans.values()), [spans[i] for i in held.get(key, ("", []))[1]], placement.arena)
    assert kept.start % SEGMENT_ALIGN == 0 and (kept.start == 0) == (not held)
    calls = data.draw(st.lists(st.sampled_from(list(used)), max_size=12))
    left: dict[int, list[tuple[int, int]]] = {}
    for key in calls:
        for entry, pieces in left.items():
            crossing = [(one, other) for one in pieces for other in placed[key].pieces if one[0] < other[1] and other[0] < one[1]]
            assert entry == key[0] or not crossing
        if placed[key].kept:
            left[key[0]] = placed[key].kept


def test_an_output_that_is_an_input_or_a_weight() -> None:
    lowered = traced([256], [launch(0)], [0])
    for index, kind in ((1, "input"), (2, "weight")):
        program = replace(lowered, outputs=(replace(lowered.outputs[0], pointer=at(index)),))
        with raises("donation-refused", match=f"output 3 of make\\(\\) is a {kind} of the program itself"):
            keep_outputs({(): whole(program)}, {(): (DonatedOutput(entry="make", number=3, region=0, output=0),)})


def test_two_outputs_in_one_buffer_take_its_place_once() -> None:
    lowered = traced([512], [launch(0)], [0, 0])
    program = whole(lowered)
    outputs = tuple([DonatedOutput(entry="make", number=i, region=0, output=i) for i in range(2)])
    kept = keep_outputs({(): program}, {(): outputs})
    assert [(row.offset, row.bytes) for row in kept.reserved] == [(0, 512 + PAD)]
