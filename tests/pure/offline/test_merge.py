"""Separately traced regions become one program with the same values in the same memory. No value is overwritten that a later region
or the host still reads, and the memory of dead values is used again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cgcompile.offline.assemble.arena import Plan, lifetimes, plan
from cgcompile.offline.assemble.merge import LoweredRegion, merge, whole
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
    FoldedConstant,
    HostRead,
    KernelVariant,
    Launch,
    Lowered,
    LoweredProgram,
    Pointer,
    Release,
)
from cgcompile.targets.memory_layout import PAD
from tests.helpers.raising import raises

KEY = (4,)


def kernel(name: str) -> KernelVariant:
    return KernelVariant(
        name=name, source="", signature=(), constants=(), divisible=(), warps=4, stages=1, options=(), selected_by="only"
    )  # fmt: skip


def place(buffer: int, offset: int = 0) -> Pointer:
    return Pointer(buffer=buffer, offset=offset)


def tensor(at: Pointer, size: int = 256) -> BufferView:
    return BufferView(pointer=at, dtype="uint8", shape=(size,), strides=(1,))


def launch(*buffers: int, variant: int = 0) -> Launch:
    return Launch(variant=variant, grid=(1, 1, 1), arguments=(7, *map(place, buffers)))


def region(inputs: int, temporaries: Sequence[int], events: Iterable[Event], outputs: Sequence[int]) -> Lowered:
    """Returns a region with this many inputs of 256 bytes, a weight "w", and temporaries of these sizes, in that order."""
    buffers = (
        *(Buffer(kind=INPUT, name=str(i), nbytes=256) for i in range(inputs)),
        Buffer(kind=WEIGHT, name="w", nbytes=256),
        *(Buffer(kind=TEMPORARY, name=f"t{i}", nbytes=size) for i, size in enumerate(temporaries)),
    )
    return Lowered(
        key=KEY,
        buffers=buffers,
        variants=(kernel("kernel"),),
        events=tuple(events),
        inputs=tuple(tensor(place(i)) for i in range(inputs)),
        outputs=tuple(tensor(place(i), buffers[i].nbytes) for i in outputs),
    )


def graph(name: str, inputs: str, outputs: str, traced: Lowered) -> LoweredRegion:
    return LoweredRegion(name=name, inputs=tuple(inputs.split()), outputs=tuple(outputs.split()), lowered=traced)


def host(inputs: str, outputs: str) -> LoweredRegion:
    return LoweredRegion(name="host", inputs=tuple(inputs.split()), outputs=tuple(outputs.split()), lowered=None)


REGIONS = (
    graph("graph-1", "x", "a b", region(1, [1024, 256, 256], [launch(0, 2), launch(1, 2, 3), launch(2, 4)], [3, 4])),
    host("b", "c"),
    graph("graph-2", "c", "d", region(1, [1024, 256], [launch(0, 2), launch(2, 3)], [3])),
    graph("graph-3", "a d", "e", region(2, [1024, 256], [launch(0, 1, 3), launch(3, 4)], [4])),
)
"""x -> a, b; the host: b -> c; c -> d; a, d -> e. Each graph has a temporary of 1024 bytes."""


def three_regions() -> LoweredProgram:
    return merge(KEY, REGIONS, input_names=["x", "c"], outputs=["e", "c", "x"])


def named(merged: LoweredProgram) -> dict[str, int]:
    """Returns the positions of the temporaries by name."""
    return {buffer.name: i for i, buffer in enumerate(merged.lowered.buffers) if buffer.kind == TEMPORARY}


# --- what is merged -------------------------------------------------------------------------------------------


def test_a_value_is_the_same_buffer_in_every_region() -> None:
    merged = three_regions()
    first, second, third = merged.regions
    assert [section.name for section in merged.regions] == ["graph-1", "graph-2", "graph-3"]
    assert third.inputs == (first.outputs[0], second.outputs[0])
    events = merged.lowered.events
    assert (first.start, first.stop, second.start, second.stop, third.start, third.stop) == (0, 3, 4, 6, 6, 8)
    names = named(merged)
    assert events[3] == HostRead(buffer=names["graph-1.t2"]), "the host reads b before graph-2"
    taken = events[6]
    assert isinstance(taken, Launch)
    assert taken.arguments == (7, place(names["graph-1.t1"]), place(names["graph-2.t1"]), place(names["graph-3.t0"]))
    assert merged.lowered.outputs == third.outputs, "c and x lie where the caller put them, or the host"


def test_inputs_and_weights_stand_once_and_what_the_host_makes_behind_the_calls() -> None:
    buffers = three_regions().lowered.buffers
    assert [(buffer.kind, buffer.name) for buffer in buffers if buffer.kind != TEMPORARY] == [
        (INPUT, "0"), (WEIGHT, "w"), (INPUT, "1"),
    ]  # fmt: skip


def test_kernels_and_constants_stand_once() -> None:
    one = replace(
        region(0, [256], [launch(1), launch(1, variant=1)], [1]),
        variants=(kernel("own"), kernel("shared")),
        constants=(folded("c", "scale"), folded("w", "bias")),
    )
    other = replace(region(0, [256], [launch(1)], [1]), variants=(kernel("shared"),), constants=(folded("c", "shift"),))
    traced = merge(KEY, [graph("graph-1", "", "a", one), graph("graph-2", "", "b", other)], [], ["a", "b"]).lowered
    assert [variant.name for variant in traced.variants] == ["own", "shared"]
    assert [event.variant for event in traced.events if isinstance(event, Launch)] == [0, 1, 1]
    assert traced.constants == (folded("c", "scale", "shift"), folded("w", "bias")), "equal ones came from two weights"


def folded(name: str, *sources: str) -> FoldedConstant:
    return FoldedConstant(name=name, contents=name.encode(), sources=sources)


def test_every_event_moves_to_where_its_buffers_went() -> None:
    events: list[Event] = [
        Allocate(buffer=2), Fill(target=place(2, 8), value=1, element=1, count=4),
        Copy(source=place(0, 16), target=place(2, 32), nbytes=64), Release(buffer=2),
    ]  # fmt: skip
    maker = replace(region(0, [512], [launch(1)], []), outputs=(tensor(place(1, 256)),))
    traced = merge(KEY, [graph("a", "", "v", maker), graph("b", "v", "", region(1, [512], events, []))], [], []).lowered
    names = {buffer.name: i for i, buffer in enumerate(traced.buffers)}
    a_buffer, b_buffer = names["a.t0"], names["b.t0"]
    assert traced.events[1:] == (
        Allocate(buffer=b_buffer), Fill(target=place(b_buffer, 8), value=1, element=1, count=4),
        Copy(source=place(a_buffer, 272), target=place(b_buffer, 32), nbytes=64), Release(buffer=b_buffer),
    )  # fmt: skip


def test_the_host_reads_a_value_once() -> None:
    maker = region(0, [256], [launch(1)], [1])
    traced = merge(KEY, [graph("a", "", "v", maker), host("v", ""), host("v x", "")], ["x"], []).lowered
    assert [event for event in traced.events if isinstance(event, HostRead)] == [HostRead(buffer=1)]


def test_one_graph_is_a_program_of_one() -> None:
    traced = region(1, [256], [launch(0, 2)], [2])
    (section,) = whole(traced).regions
    assert (whole(traced).lowered, section.start, section.stop) == (traced, 0, 1)
    assert (section.inputs, section.outputs) == (traced.inputs, traced.outputs)


@pytest.mark.parametrize(
    "view",
    [
        BufferView(pointer=place(1), dtype="int8", shape=(256,), strides=(1,)),
        BufferView(pointer=place(1), dtype="uint8", shape=(255,), strides=(1,)),
        BufferView(pointer=place(1), dtype="uint8", shape=(256,), strides=(2,)),
    ],
)
def test_a_value_that_is_taken_otherwise_than_it_was_made_is_refused(view: BufferView) -> None:
    maker = replace(region(0, [512], [launch(1)], []), outputs=(view,))
    with raises("inputs-unlike", match=r"int_key \(4,\), b: v is read with layout .*, but was computed with layout"):
        merge(KEY, [graph("a", "", "v", maker), graph("b", "v", "", region(1, [], [launch(0)], []))], [], [])


def test_strides_of_axes_of_one_element_say_nothing() -> None:
    view = BufferView(pointer=place(1), dtype="uint8", shape=(1, 256), strides=(7, 1))
    taker = replace(region(1, [], [launch(0)], []), inputs=(replace(view, pointer=place(0), strides=(256, 1)),))
    maker = replace(region(0, [512], [launch(1)], []), outputs=(view,))
    assert merge(KEY, [graph("a", "", "v", maker), graph("b", "v", "", taker)], [], []).regions[1].inputs[0].pointer == place(1)


def test_a_value_that_leaves_its_buffer_is_refused() -> None:
    maker = replace(region(0, [256], [launch(1)], []), outputs=(tensor(place(1, 16)),))
    with raises("place-invalid", match=r"int_key \(4,\), b: v, 256 bytes"):
        merge(KEY, [graph("a", "", "v", maker), graph("b", "v", "", region(1, [], [launch(0)], []))], [], [])


# --- lifetimes across regions ---------------------------------------------------------------------------------


def test_a_value_keeps_its_memory_until_its_last_reader_and_a_dead_one_gives_it_back() -> None:
    merged = three_regions()
    layout = plan(merged.lowered)
    check_plan(merged.lowered, layout)
    names, offsets = named(merged), layout.offsets
    kept = range(offsets[names["graph-1.t1"]], offsets[names["graph-1.t1"]] + 256)
    for name in ("graph-2.t0", "graph-2.t1"):
        size = merged.lowered.buffers[names[name]].nbytes
        assert not set(kept) & set(range(offsets[names[name]], offsets[names[name]] + size)), "a is read in graph-3"
    alone = [plan(region.lowered).arena - PAD for region in REGIONS if region.lowered]
    assert (alone, layout.arena - PAD) == ([1536, 1280, 1280], 1536), "the wide temporary of one region lies where the others' did"


def test_a_planted_overlap_of_two_regions_is_caught() -> None:
    merged = three_regions()
    layout, names = plan(merged.lowered), named(merged)
    planted = {**layout.offsets, names["graph-2.t1"]: layout.offsets[names["graph-1.t1"]]}
    with raises("arena-overlap", match=r"\(graph-2.t1, 256 bytes at \d+\) overlaps buffer \d+ \(graph-1.t1, .*until event 6"):
        check_plan(merged.lowered, replace(layout, offsets=planted, arena=1 << 16))


def test_what_the_host_reads_later_is_not_written_over_by_the_region_between() -> None:
    names = named(three_regions())
    late = merge(
        KEY,
        [
            graph("graph-1", "", "a", region(0, [256], [launch(1)], [1])),
            graph("graph-2", "", "b", region(0, [256], [launch(1)], [1])),
            host("a", ""),
        ],
        [],
        [],
    )
    names, layout = named(late), plan(late.lowered)
    assert layout.offsets[names["graph-1.t0"]] != layout.offsets[names["graph-2.t0"]]
    with raises("arena-overlap", match="needed until event 2"):
        check_plan(late.lowered, replace(layout, offsets=dict.fromkeys(layout.offsets, 0)))


# --- whatever the regions are ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """Regions, the values of the call and of the host, and the outputs."""

    regions: tuple[LoweredRegion, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws some graphs and hosts, each with earlier values as inputs. Values of hosts are in `inputs`."""
    known, regions, landed = ["x"], [], []
    for number in range(draw(st.integers(1, 5))):
        inputs = tuple(draw(st.lists(st.sampled_from(known), unique=True, max_size=3)))
        if draw(st.booleans()) and number:
            outputs = (f"h{number}",) if draw(st.booleans()) else ()
            landed += outputs
            regions.append(LoweredRegion(name=f"host-{number}", inputs=inputs, outputs=outputs, lowered=None))
        else:
            count = draw(st.integers(1, 4))
            buffers = range(len(inputs) + 1, len(inputs) + 1 + count)
            uses = st.lists(st.integers(0, buffers[-1]), min_size=1, max_size=4)
            events = [launch(*draw(uses)) for _ in range(draw(st.integers(1, 4)))]
            touched = sorted({arg.buffer for event in events for arg in event.arguments if isinstance(arg, Pointer)} & set(buffers))
            output_buffers = draw(st.lists(st.sampled_from(touched), unique=True, max_size=2)) if touched else []
            outputs = tuple(f"g{number}.{i}" for i in output_buffers)
            traced = region(len(inputs), [256 for _ in buffers], events, output_buffers)
            regions.append(LoweredRegion(name=f"graph-{number}", inputs=inputs, outputs=outputs, lowered=traced))
        known += outputs
    outputs = tuple(draw(st.lists(st.sampled_from(known), unique=True, max_size=3)))
    return Case(regions=tuple(regions), inputs=("x", *landed), outputs=outputs)


Tag = object
"""The content of a buffer: which event wrote it, and from which values."""


def apart(case: Case) -> list[Tag]:
    """Runs every region with its own memory. Returns the values that the host reads, region by region, and the outputs."""
    values: dict[str, Tag] = dict.fromkeys(case.inputs, "given")
    seen: list[Tag] = []
    for region in case.regions:
        if region.lowered is None:
            seen += [values[name] for name in region.inputs]
            continue
        memory: dict[int, Tag] = {number: values[name] for number, name in enumerate(region.inputs)}
        for event in region.lowered.events:
            touched = list(dict.fromkeys(arg.buffer for arg in event.arguments if isinstance(arg, Pointer)))  # type: ignore[union-attr]
            written = hash(tuple(memory.get(i) for i in touched))
            memory.update({i: (written, place) for place, i in enumerate(touched) if i > len(region.inputs)})
        values.update({name: memory.get(t.pointer.buffer) for name, t in zip(region.outputs, region.lowered.outputs, strict=True)})
    return [*seen, *[values[name] for name in case.outputs]]


def together(case: Case, merged: LoweredProgram, layout: Plan) -> list[Tag]:
    """Runs the merged program, with temporaries in one arena of blocks of 256 bytes. Returns the same as `apart`."""
    traced, memory = merged.lowered, dict[object, Tag]()
    views: dict[str, BufferView] = {}
    on_host: dict[str, Tag] = {}
    seen: list[Tag] = []

    def where(buffer: int) -> object:
        held = traced.buffers[buffer]
        return layout.offsets[buffer] if held.kind == TEMPORARY else (held.kind, held.name)

    memory |= {(INPUT, str(number)): "given" for number in range(len(case.inputs))}
    events_of = iter(merged.regions)
    fresh: set[int] = set()
    for region in case.regions:
        if region.lowered is None:
            for n in region.inputs:  # the host keeps a copy of what it read
                on_host.setdefault(n, memory.get(where(views[n].pointer.buffer)) if n in views else "given")
            seen += [on_host[n] for n in region.inputs]
            continue
        section = next(events_of)
        for event in traced.events[section.start : section.stop]:
            touched = list(dict.fromkeys(arg.buffer for arg in event.arguments if isinstance(arg, Pointer)))  # type: ignore[union-attr]
            for i in touched:  # a buffer without a write holds no value
                if traced.buffers[i].kind == TEMPORARY and i not in fresh:
                    fresh.add(i)
                    memory.pop(where(i), None)
            written = hash(tuple(memory.get(where(i)) for i in touched))
            taken = {t.pointer.buffer for t in section.inputs}
            ordinals = {i: number for number, i in enumerate(touched) if traced.buffers[i].kind == TEMPORARY and i not in taken}
            memory.update({where(i): (written, number) for i, number in ordinals.items()})
        views.update(zip(region.outputs, section.outputs, strict=True))
    return [*seen, *["given" if name in case.inputs else memory.get(where(views[name].pointer.buffer)) for name in case.outputs]]


@given(cases())
def test_the_merged_program_computes_what_the_regions_do(case: Case) -> None:
    merged = merge(KEY, case.regions, case.inputs, case.outputs)
    layout = plan(merged.lowered)
    check_plan(merged.lowered, layout)
    assert together(case, merged, layout) == apart(case)


@given(cases(), st.data())
def test_an_overlap_of_any_two_lives_is_caught(case: Case, data: st.DataObject) -> None:
    merged = merge(KEY, case.regions, case.inputs, case.outputs)
    layout, lives = plan(merged.lowered), lifetimes(merged.lowered)
    pairs = [(a, b) for a in lives for b in lives if a.buffer != b.buffer and a.first <= b.last and b.first <= a.last]
    assume(pairs)
    a, b = data.draw(st.sampled_from(pairs))
    offsets: Mapping[int, int] = {**layout.offsets, a.buffer: layout.offsets[b.buffer]}
    with raises("arena-overlap"):
        check_plan(merged.lowered, replace(layout, offsets=offsets, arena=1 << 20))
