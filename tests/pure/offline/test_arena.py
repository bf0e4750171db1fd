"""Arena plans: buffers in use at the same time do not overlap, outputs stay, and the arena is close to the lower bound. The check
of a plan uses only launches, and agrees with a byte-wise simulation of memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cgcompile.errors import BuildError
from cgcompile.offline.assemble.arena import Plan, largest_sum, lifetimes, plan
from cgcompile.offline.assemble.plan_check import check_plan
from cgcompile.offline.lowered import (
    INPUT,
    TEMPORARY,
    WEIGHT,
    Allocate,
    Buffer,
    BufferView,
    Copy,
    Event,
    Fill,
    HostRead,
    KernelVariant,
    Launch,
    Lowered,
    Pointer,
    Release,
)
from cgcompile.targets.memory_layout import PAD, align
from tests.helpers.raising import raises

KERNEL = KernelVariant(
    name="kernel", source="", signature=(), constants=(), divisible=(), warps=4, stages=1, options=(), selected_by="only"
)


def place(buffer: int) -> Pointer:
    return Pointer(buffer=buffer, offset=0)


def launch(*buffers: int) -> Launch:
    return Launch(variant=0, grid=(1, 1, 1), arguments=(7, *map(place, buffers)))


def traced(sizes: Sequence[int], events: Iterable[Event], outputs: Sequence[int] = ()) -> Lowered:
    """Returns a program with temporaries of these sizes, followed by an input and a weight."""
    others = (Buffer(kind=INPUT, name="0", nbytes=512), Buffer(kind=WEIGHT, name="w", nbytes=512))
    return Lowered(
        key=(4,),
        buffers=(*(Buffer(kind=TEMPORARY, name=f"buf{i}", nbytes=size) for i, size in enumerate(sizes)), *others),
        variants=(KERNEL,),
        events=tuple(events),
        inputs=(),
        outputs=tuple(BufferView(pointer=place(i), dtype="uint8", shape=(sizes[i],), strides=(1,)) for i in outputs),
    )


def intervals(rows: Sequence[tuple[int, int, int]], outputs: Sequence[int] = ()) -> Lowered:
    """Returns a program from (bytes, first launch, last launch) of each buffer."""
    moments = range(max(last for _, _, last in rows) + 1)
    uses = [[i for i, (_, first, last) in enumerate(rows) if moment in (first, last)] for moment in moments]
    return traced([size for size, _, _ in rows], [launch(*use) for use in uses], outputs)


def at(offsets: Mapping[int, int], arena: int = 1 << 20) -> Plan:
    return Plan(offsets=offsets, arena=arena, bound=0)


@st.composite
def programs(draw: st.DrawFn) -> Lowered:
    """Draws launches, copies, fills and host reads over some temporaries. Some have an Allocate before their first use and a
    Release after their last one."""
    sizes = draw(st.lists(st.integers(0, 1500), min_size=1, max_size=9))
    buffers = st.integers(0, len(sizes) + 1)  # also the input and the weight
    uses: list[Event] = []
    for _ in range(draw(st.integers(0, 14))):
        kind = draw(st.sampled_from(["launch", "launch", "copy", "fill", "read"]))
        if kind == "launch":
            uses.append(launch(*draw(st.lists(buffers, max_size=4))))
        elif kind == "copy":
            uses.append(Copy(source=place(draw(buffers)), target=place(draw(buffers)), nbytes=1))
        elif kind == "fill":
            uses.append(Fill(target=place(draw(buffers)), value=0, element=1, count=1))
        else:
            uses.append(HostRead(buffer=draw(buffers)))
    outputs = draw(st.lists(st.integers(0, len(sizes) - 1), unique=True, max_size=3))
    noted = draw(st.sets(st.integers(0, len(sizes) - 1)))
    events: list[Event] = []
    for moment, event in enumerate(uses):
        touched = sorted(set(named(event)) & noted)
        events += [Allocate(buffer=i) for i in touched if not any(i in named(other) for other in uses[:moment])]
        events.append(event)
        events += [Release(buffer=i) for i in touched if not any(i in named(other) for other in uses[moment + 1 :])]
    return traced(sizes, events, outputs)


def named(event: Event) -> list[int]:
    if isinstance(event, Launch):
        return [argument.buffer for argument in event.arguments if isinstance(argument, Pointer)]
    if isinstance(event, Copy):
        return [event.source.buffer, event.target.buffer]
    return [event.target.buffer] if isinstance(event, Fill) else [event.buffer] if isinstance(event, HostRead) else []


def spoils(program: Lowered, memory_plan: Plan) -> bool:
    """Returns whether a run destroys data. Every event reads its buffers if they were written, then writes them; the outputs are
    read and written at the end."""
    memory: dict[int, int] = {}
    tags: dict[int, int] = {}
    tag = 0

    def holds(buffer: int) -> bool:
        start = memory_plan.offsets[buffer]
        return all(memory[start + i] == tags[buffer] for i in range(program.buffers[buffer].nbytes))

    steps = [named(event) for event in program.events] + [[tensor.pointer.buffer for tensor in program.outputs]]
    for step in steps:
        touched = [i for i in dict.fromkeys(step) if program.buffers[i].kind == TEMPORARY]
        if not all(holds(i) for i in touched if i in tags):
            return True
        for i in touched:
            tag += 1
            tags[i] = tag
            memory.update(dict.fromkeys(range(memory_plan.offsets[i], memory_plan.offsets[i] + program.buffers[i].nbytes), tag))
        if not all(map(holds, touched)):
            return True
    return False


def refused(program: Lowered, memory_plan: Plan) -> bool:
    try:
        check_plan(program, memory_plan)
    except BuildError:
        return True
    return False


# --- plans ----------------------------------------------------------------------------------------------------


@given(programs())
def test_a_plan_destroys_nothing_and_passes_the_check(program: Lowered) -> None:
    memory_plan = plan(program)
    check_plan(program, memory_plan)
    assert not spoils(program, memory_plan)
    assert set(memory_plan.offsets) == {i for i, buffer in enumerate(program.buffers) if buffer.kind == TEMPORARY}
    assert all(offset % 256 == 0 for offset in memory_plan.offsets.values())
    sizes = sum(align(buffer.nbytes) for buffer in program.buffers if buffer.kind == TEMPORARY)
    assert memory_plan.bound + PAD <= memory_plan.arena <= sizes + PAD
    assert plan(program) == memory_plan


def test_buffers_share_memory_when_one_ends_before_the_other_begins() -> None:
    memory_plan = plan(intervals([(1000, 0, 1), (1000, 1, 2), (1000, 2, 3), (1000, 3, 4)]))
    assert memory_plan.bound == 2048
    assert memory_plan.arena == 2048 + PAD
    assert memory_plan.offsets[0] == memory_plan.offsets[2] != memory_plan.offsets[1] == memory_plan.offsets[3]


def test_two_buffers_of_one_launch_lie_apart() -> None:
    """The last use of one buffer and the first use of the other are in one launch, which reads the one while it writes the
    other."""
    memory_plan = plan(intervals([(256, 0, 1), (256, 1, 2)]))
    assert memory_plan.offsets[0] != memory_plan.offsets[1]


def test_outputs_live_to_the_end_even_when_released() -> None:
    events: list[Event] = [launch(0), Release(buffer=0), launch(1), launch(1)]
    assert plan(traced([256, 256], events)).arena == 256 + PAD
    assert plan(traced([256, 256], events, outputs=[0])).arena == 512 + PAD


def test_what_the_host_reads_lives_until_then() -> None:
    events: list[Event] = [launch(0), launch(1), HostRead(buffer=0), launch(2)]
    memory_plan = plan(traced([256, 256, 256], events))
    assert memory_plan.arena == 512 + PAD
    assert memory_plan.offsets[0] != memory_plan.offsets[1]
    assert plan(traced([256, 256, 256], [event for event in events if not isinstance(event, HostRead)])).arena == 256 + PAD


def test_empty_and_unused_temporaries_have_a_place() -> None:
    program = traced([0, 4096, 300], [launch(0, 2)])
    memory_plan = plan(program)
    assert memory_plan == Plan(offsets={0: 0, 1: 0, 2: 0}, arena=512 + PAD, bound=512)
    check_plan(program, memory_plan)


def test_a_program_without_temporaries_needs_only_the_pad() -> None:
    assert plan(traced([], [])) == Plan(offsets={}, arena=PAD, bound=0)


def test_the_bound_is_the_largest_sum_at_one_moment() -> None:
    assert largest_sum(lifetimes(intervals([(100, 0, 3), (300, 1, 2), (1000, 3, 5), (1, 4, 5)]))) == 256 + 1024
    assert largest_sum(()) == 0


def transformer(layers: int) -> list[tuple[int, int, int]]:
    """Returns (bytes, first, last) of a fused transformer's buffers: a residual stream, and short-lived wide buffers."""
    rows, t, e = [], 0, 2048 * 768 * 2
    for _ in range(layers):
        rows += [(2048 * 4, t, t + 1), (3 * e, t + 1, t + 4), (5 * e, t + 2, t + 3), (5 * e, t + 3, t + 4), (e, t + 4, t + 5)]
        rows += [(e, t + 5, t + 9), (e, t + 6, t + 7), (4 * e, t + 7, t + 8), (4 * e, t + 8, t + 9), (e, t + 9, t + 14)]
        t += 10
    return rows


def unet(depth: int) -> list[tuple[int, int, int]]:
    """Returns (bytes, first, last) for a network with skip connections, whose buffers grow and shrink."""
    rows, end = [], 8 * depth
    for i in range(depth):
        size = 64 * 512 * 512 >> i
        rows += [(size, 4 * i, 4 * i + 1), (size, 4 * i + 1, 4 * i + 2), (size + i, 4 * i + 2, end - 4 * i)]
        rows += [(size // 4, 4 * i + 3, 4 * i + 4)]
    for i in reversed(range(depth)):
        size, t = 64 * 512 * 512 >> i, end - 4 * i - 4
        rows += [(size, t, t + 1), (2 * size, t + 1, t + 4), (size, t + 2, t + 3), (size, t + 3, t + 4)]
    return rows


def concatenating(count: int) -> list[tuple[int, int, int]]:
    """Returns (bytes, first, last) of buffers of mixed sizes, some long-lived, as in a DenseNet."""
    lengths = (1, 1, 2, 3, 12, 1, 25)
    return [(1000 * (1 + 5 * i % 7), i, i + lengths[i * i % 7]) for i in range(count)]


@pytest.mark.parametrize("rows", [transformer(12), transformer(200), unet(5), concatenating(200), concatenating(2000)])
def test_arenas_of_real_programs_are_close_to_the_bound(rows: list[tuple[int, int, int]]) -> None:
    program = intervals(rows, outputs=[len(rows) - 1])
    memory_plan = plan(program)
    check_plan(program, memory_plan)
    assert memory_plan.arena - PAD <= 1.05 * memory_plan.bound


def test_orders_are_changed_when_all_that_are_tried_first_waste_memory() -> None:
    """With the fixed orders, these programs need 256 bytes more than the bound."""
    rows = [(6, 6, 7), (7, 1, 5), (7, 2, 3), (5, 5, 7), (5, 6, 7), (2, 2, 3)]
    memory_plan = plan(intervals([(256 * blocks, first, last) for blocks, first, last in rows]))
    assert memory_plan.arena - PAD == memory_plan.bound == 16 * 256


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([launch(0), Allocate(buffer=0)], r"event 1: buffer 0 \(temporary buf0\) is allocated after its first use"),
        ([Allocate(buffer=0), launch(0), Allocate(buffer=0)], "allocated a second time"),
        ([launch(0, 1), Release(buffer=1), launch(1)], r"int_key \(4,\), event 2: buffer 1 .* used after its release"),
    ],
)
def test_broken_lifetimes_are_refused(events: list[Event], message: str) -> None:
    with raises("lifetime-broken", match=message):
        plan(traced([8, 8], events))


# --- the check ------------------------------------------------------------------------------------------------


@given(programs(), st.data())
def test_the_check_refuses_what_destroys_something_and_nothing_else(program: Lowered, data: st.DataObject) -> None:
    temporaries = [i for i, buffer in enumerate(program.buffers) if buffer.kind == TEMPORARY]
    offsets = {i: 256 * data.draw(st.integers(0, 12), label=f"buffer {i}") for i in temporaries}
    memory_plan = at(offsets)
    assert refused(program, memory_plan) == spoils(program, memory_plan)


@given(programs(), st.data())
def test_a_planted_overlap_is_caught(program: Lowered, data: st.DataObject) -> None:
    memory_plan, lives = plan(program), lifetimes(program)
    pairs = [(a, b) for a in lives for b in lives if a.buffer != b.buffer and a.first <= b.last and b.first <= a.last]
    assume(pairs)
    a, b = data.draw(st.sampled_from(pairs))
    planted = replace(memory_plan, offsets={**memory_plan.offsets, a.buffer: memory_plan.offsets[b.buffer]}, arena=1 << 20)
    with raises("arena-overlap"):
        check_plan(program, planted)


def test_the_message_names_both_buffers_and_the_launch() -> None:
    program = intervals([(600, 0, 4), (100, 2, 3)])
    with raises("arena-overlap") as caught:
        check_plan(program, at({0: 0, 1: 512}))
    assert str(caught.value) == (
        "int_key (4,), event 2 (kernel): buffer 1 (buf1, 100 bytes at 512) overlaps buffer 0 (buf0, 600 bytes at 0), which is "
        "needed until event 4"
    )


def test_a_value_that_the_host_still_reads_is_not_written_over() -> None:
    program = traced([256, 256], [launch(0), launch(1), HostRead(buffer=0)])
    with raises("arena-overlap", match=r"buffer 1 .* overlaps buffer 0 .* needed until event 2"):
        check_plan(program, at({0: 0, 1: 0}))
    check_plan(traced([256, 256], [launch(0), HostRead(buffer=0), launch(1)]), at({0: 0, 1: 0}))


def test_an_output_that_is_written_over_is_caught() -> None:
    program = traced([256, 256], [launch(0), launch(1)], outputs=[0])
    with raises("arena-overlap", match=r"buffer 1 .* overlaps buffer 0 .* needed at the end"):
        check_plan(program, at({0: 0, 1: 0}))
    check_plan(replace(program, outputs=()), at({0: 0, 1: 0}))


def test_allocate_and_release_do_not_matter_to_the_check() -> None:
    """These events may be wrong: a plan that reuses memory after a Release, but before the last use, is refused."""
    program = traced([256, 256], [launch(0), Release(buffer=0), launch(1), launch(0, 1)])
    with raises("arena-overlap"):
        check_plan(program, at({0: 0, 1: 0}))


@pytest.mark.parametrize(
    ("offset", "arena", "message"),
    [
        (0, 511, "does not lie inside the arena of 511 bytes"),
        (256, 767, "does not lie inside"),
        (128, 4096, "offset 128, no multiple of 256"),
        (-256, 4096, "offset -256"),
    ],
)
def test_a_place_outside_the_arena_or_not_aligned_is_refused(offset: int, arena: int, message: str) -> None:
    with raises("place-invalid", match=message):
        check_plan(traced([256], [launch(0)]), at({0: offset}, arena))


def test_a_place_up_to_the_pad_is_accepted() -> None:
    check_plan(traced([256], [launch(0)]), at({0: 256}, 768))


def test_a_temporary_without_a_place_and_another_buffer_with_one_are_refused() -> None:
    program = traced([256], [launch(0)])
    with raises("place-invalid", match=r"buffer 0 \(buf0\) has no place in the arena"):
        check_plan(program, at({}))
    with raises("place-invalid", match=r"buffer 1 \(input 0\) has a place in the arena"):
        check_plan(program, at({0: 0, 1: 512}))
