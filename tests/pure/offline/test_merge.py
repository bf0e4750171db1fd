"""Regions that were traced apart become one program: the same values in the same memory, nothing written over that a later region
or the host still reads, and what is dead gives its memory back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cgcompile.offline.assemble.arena import Plan, lifetimes, plan
from cgcompile.offline.assemble.lifetimes import check_plan
from cgcompile.offline.assemble.merge import Piece, merge, whole
from cgcompile.offline.traced import (
    INPUT,
    TEMPORARY,
    WEIGHT,
    Allocate,
    Buffer,
    Chain,
    Constant,
    Copy,
    Event,
    Fill,
    Launch,
    Place,
    Read,
    Release,
    Tensor,
    Traced,
    Variant,
)
from cgcompile.targets.cuda.memory_layout import PAD
from tests.helpers.raising import raises

KEY = (4,)


def kernel(name: str) -> Variant:
    return Variant(
        name=name, source="", signature=(), constants=(), divisible=(), warps=4, stages=1, options=(), chosen="only"
    )  # fmt: skip


def place(buffer: int, offset: int = 0) -> Place:
    return Place(buffer=buffer, offset=offset)


def tensor(at: Place, size: int = 256) -> Tensor:
    return Tensor(place=at, dtype="uint8", shape=(size,), strides=(1,))


def launch(*buffers: int, variant: int = 0) -> Launch:
    return Launch(variant=variant, grid=(1, 1, 1), arguments=(7, *map(place, buffers)))


def region(inputs: int, temporaries: Sequence[int], events: Iterable[Event], outputs: Sequence[int]) -> Traced:
    """A region of so many inputs of 256 bytes, one weight "w", and temporaries of these sizes, in this order of buffers."""
    buffers = (
        *(Buffer(kind=INPUT, name=str(i), nbytes=256) for i in range(inputs)),
        Buffer(kind=WEIGHT, name="w", nbytes=256),
        *(Buffer(kind=TEMPORARY, name=f"t{i}", nbytes=size) for i, size in enumerate(temporaries)),
    )
    return Traced(
        key=KEY,
        buffers=buffers,
        variants=(kernel("kernel"),),
        events=tuple(events),
        inputs=tuple(tensor(place(i)) for i in range(inputs)),
        outputs=tuple(tensor(place(i), buffers[i].nbytes) for i in outputs),
    )


def graph(name: str, inputs: str, outputs: str, traced: Traced) -> Piece:
    return Piece(name=name, inputs=tuple(inputs.split()), outputs=tuple(outputs.split()), traced=traced)


def host(inputs: str, outputs: str) -> Piece:
    return Piece(name="host", inputs=tuple(inputs.split()), outputs=tuple(outputs.split()), traced=None)


PIECES = (
    graph("graph-1", "x", "a b", region(1, [1024, 256, 256], [launch(0, 2), launch(1, 2, 3), launch(2, 4)], [3, 4])),
    host("b", "c"),
    graph("graph-2", "c", "d", region(1, [1024, 256], [launch(0, 2), launch(2, 3)], [3])),
    graph("graph-3", "a d", "e", region(2, [1024, 256], [launch(0, 1, 3), launch(3, 4)], [4])),
)
"""x -> a, b; the host: b -> c; c -> d; a, d -> e.  Each graph has a temporary of 1024 bytes."""


def chain_of_three() -> Chain:
    return merge(KEY, PIECES, given=["x", "c"], outputs=["e", "c", "x"])


def named(chain: Chain) -> dict[str, int]:
    """The temporaries' positions by name."""
    return {buffer.name: i for i, buffer in enumerate(chain.traced.buffers) if buffer.kind == TEMPORARY}


# --- what is merged -------------------------------------------------------------------------------------------


def test_a_value_is_the_same_buffer_in_every_region() -> None:
    chain = chain_of_three()
    first, second, third = chain.sections
    assert [section.name for section in chain.sections] == ["graph-1", "graph-2", "graph-3"]
    assert third.inputs == (first.outputs[0], second.outputs[0])
    events = chain.traced.events
    assert (first.start, first.stop, second.start, second.stop, third.start, third.stop) == (0, 3, 4, 6, 6, 8)
    names = named(chain)
    assert events[3] == Read(buffer=names["graph-1.t2"]), "the host reads b before graph-2"
    taken = events[6]
    assert isinstance(taken, Launch)
    assert taken.arguments == (7, place(names["graph-1.t1"]), place(names["graph-2.t1"]), place(names["graph-3.t0"]))
    assert chain.traced.outputs == third.outputs, "c and x lie where the caller put them, or the host"


def test_inputs_and_weights_stand_once_and_what_the_host_makes_behind_the_calls() -> None:
    buffers = chain_of_three().traced.buffers
    assert [(buffer.kind, buffer.name) for buffer in buffers if buffer.kind != TEMPORARY] == [
        (INPUT, "0"), (WEIGHT, "w"), (INPUT, "1"),
    ]  # fmt: skip


def test_kernels_and_constants_stand_once() -> None:
    one = replace(
        region(0, [256], [launch(1), launch(1, variant=1)], [1]),
        variants=(kernel("own"), kernel("shared")),
        constants=(Constant(name="c", contents=b"c"), Constant(name="w", contents=b"w")),
    )
    other = replace(
        region(0, [256], [launch(1)], [1]), variants=(kernel("shared"),), constants=(Constant(name="c", contents=b"c"),)
    )
    traced = merge(KEY, [graph("graph-1", "", "a", one), graph("graph-2", "", "b", other)], [], ["a", "b"]).traced
    assert [variant.name for variant in traced.variants] == ["own", "shared"]
    assert [event.variant for event in traced.events if isinstance(event, Launch)] == [0, 1, 1]
    assert [constant.name for constant in traced.constants] == ["c", "w"]


def test_every_event_moves_to_where_its_buffers_went() -> None:
    events: list[Event] = [
        Allocate(buffer=2), Fill(target=place(2, 8), value=1, element=1, count=4),
        Copy(source=place(0, 16), target=place(2, 32), nbytes=64), Release(buffer=2),
    ]  # fmt: skip
    maker = replace(region(0, [512], [launch(1)], []), outputs=(tensor(place(1, 256)),))
    traced = merge(KEY, [graph("a", "", "v", maker), graph("b", "v", "", region(1, [512], events, []))], [], []).traced
    names = {buffer.name: i for i, buffer in enumerate(traced.buffers)}
    made, own = names["a.t0"], names["b.t0"]
    assert traced.events[1:] == (
        Allocate(buffer=own), Fill(target=place(own, 8), value=1, element=1, count=4),
        Copy(source=place(made, 272), target=place(own, 32), nbytes=64), Release(buffer=own),
    )  # fmt: skip


def test_the_host_reads_a_value_once() -> None:
    maker = region(0, [256], [launch(1)], [1])
    traced = merge(KEY, [graph("a", "", "v", maker), host("v", ""), host("v x", "")], ["x"], []).traced
    assert [event for event in traced.events if isinstance(event, Read)] == [Read(buffer=1)]


def test_one_graph_is_a_chain_of_one() -> None:
    traced = region(1, [256], [launch(0, 2)], [2])
    (section,) = whole(traced).sections
    assert (whole(traced).traced, section.start, section.stop) == (traced, 0, 1)
    assert (section.inputs, section.outputs) == (traced.inputs, traced.outputs)


@pytest.mark.parametrize(
    "made",
    [
        Tensor(place=place(1), dtype="int8", shape=(256,), strides=(1,)),
        Tensor(place=place(1), dtype="uint8", shape=(255,), strides=(1,)),
        Tensor(place=place(1), dtype="uint8", shape=(256,), strides=(2,)),
    ],
)
def test_a_value_that_is_taken_otherwise_than_it_was_made_is_refused(made: Tensor) -> None:
    maker = replace(region(0, [512], [launch(1)], []), outputs=(made,))
    with raises("sizes-unlike", match=r"int_key \(4,\), b: v is taken as .*, and was made as"):
        merge(KEY, [graph("a", "", "v", maker), graph("b", "v", "", region(1, [], [launch(0)], []))], [], [])


def test_strides_of_axes_of_one_element_say_nothing() -> None:
    made = Tensor(place=place(1), dtype="uint8", shape=(1, 256), strides=(7, 1))
    taker = replace(region(1, [], [launch(0)], []), inputs=(replace(made, place=place(0), strides=(256, 1)),))
    maker = replace(region(0, [512], [launch(1)], []), outputs=(made,))
    assert merge(KEY, [graph("a", "", "v", maker), graph("b", "v", "", taker)], [], []).sections[1].inputs[0].place == place(1)


def test_a_value_that_leaves_its_buffer_is_refused() -> None:
    maker = replace(region(0, [256], [launch(1)], []), outputs=(tensor(place(1, 16)),))
    with raises("place-invalid", match=r"int_key \(4,\), b: v, 256 bytes"):
        merge(KEY, [graph("a", "", "v", maker), graph("b", "v", "", region(1, [], [launch(0)], []))], [], [])


# --- lifetimes across regions ---------------------------------------------------------------------------------


def test_a_value_keeps_its_memory_until_its_last_reader_and_a_dead_one_gives_it_back() -> None:
    chain = chain_of_three()
    found = plan(chain.traced)
    check_plan(chain.traced, found)
    names, offsets = named(chain), found.offsets
    kept = range(offsets[names["graph-1.t1"]], offsets[names["graph-1.t1"]] + 256)
    for name in ("graph-2.t0", "graph-2.t1"):
        size = chain.traced.buffers[names[name]].nbytes
        assert not set(kept) & set(range(offsets[names[name]], offsets[names[name]] + size)), "a is read in graph-3"
    alone = [plan(piece.traced).arena - PAD for piece in PIECES if piece.traced]
    assert (alone, found.arena - PAD) == ([1536, 1280, 1280], 1536), "the wide temporary of one region lies where the others' did"


def test_a_planted_overlap_of_two_regions_is_caught() -> None:
    chain = chain_of_three()
    found, names = plan(chain.traced), named(chain)
    planted = {**found.offsets, names["graph-2.t1"]: found.offsets[names["graph-1.t1"]]}
    with raises("arena-overlap", match=r"\(graph-2.t1, 256 bytes at \d+\) lies over buffer \d+ \(graph-1.t1, .*until event 6"):
        check_plan(chain.traced, replace(found, offsets=planted, arena=1 << 16))


def test_what_the_host_reads_later_is_not_written_over_by_the_region_between() -> None:
    names = named(chain_of_three())
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
    names, found = named(late), plan(late.traced)
    assert found.offsets[names["graph-1.t0"]] != found.offsets[names["graph-2.t0"]]
    with raises("arena-overlap", match="needed until event 2"):
        check_plan(late.traced, replace(found, offsets=dict.fromkeys(found.offsets, 0)))


# --- whatever the regions are ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """Regions, the values of the call and of the host, and the outputs."""

    pieces: tuple[Piece, ...]
    given: tuple[str, ...]
    outputs: tuple[str, ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Some graphs and hosts; each takes values from before; those of hosts are in `given`."""
    known, pieces, landed = ["x"], [], []
    for number in range(draw(st.integers(1, 5))):
        inputs = tuple(draw(st.lists(st.sampled_from(known), unique=True, max_size=3)))
        if draw(st.booleans()) and number:
            outputs = (f"h{number}",) if draw(st.booleans()) else ()
            landed += outputs
            pieces.append(Piece(name=f"host-{number}", inputs=inputs, outputs=outputs, traced=None))
        else:
            count = draw(st.integers(1, 4))
            own = range(len(inputs) + 1, len(inputs) + 1 + count)
            uses = st.lists(st.integers(0, own[-1]), min_size=1, max_size=4)
            events = [launch(*draw(uses)) for _ in range(draw(st.integers(1, 4)))]
            touched = sorted({arg.buffer for event in events for arg in event.arguments if isinstance(arg, Place)} & set(own))
            made = draw(st.lists(st.sampled_from(touched), unique=True, max_size=2)) if touched else []
            outputs = tuple(f"g{number}.{i}" for i in made)
            traced = region(len(inputs), [256 for _ in own], events, made)
            pieces.append(Piece(name=f"graph-{number}", inputs=inputs, outputs=outputs, traced=traced))
        known += outputs
    outputs = tuple(draw(st.lists(st.sampled_from(known), unique=True, max_size=3)))
    return Case(pieces=tuple(pieces), given=("x", *landed), outputs=outputs)


Tag = object
"""What a buffer holds: what was written there from what."""


def apart(case: Case) -> list[Tag]:
    """What the host reads, region after region, and the outputs, when every region has memory of its own."""
    values: dict[str, Tag] = dict.fromkeys(case.given, "given")
    seen: list[Tag] = []
    for piece in case.pieces:
        if piece.traced is None:
            seen += [values[name] for name in piece.inputs]
            continue
        memory: dict[int, Tag] = {number: values[name] for number, name in enumerate(piece.inputs)}
        for event in piece.traced.events:
            touched = list(dict.fromkeys(arg.buffer for arg in event.arguments if isinstance(arg, Place)))  # type: ignore[union-attr]
            written = hash(tuple(memory.get(i) for i in touched))
            memory.update({i: (written, place) for place, i in enumerate(touched) if i > len(piece.inputs)})
        values.update({name: memory.get(t.place.buffer) for name, t in zip(piece.outputs, piece.traced.outputs, strict=True)})
    return [*seen, *[values[name] for name in case.outputs]]


def together(case: Case, chain: Chain, found: Plan) -> list[Tag]:
    """The same from the merged program, temporaries in one arena of blocks of 256 bytes."""
    traced, memory = chain.traced, dict[object, Tag]()
    made: dict[str, Tensor] = {}
    seen: list[Tag] = []

    def where(buffer: int) -> object:
        held = traced.buffers[buffer]
        return found.offsets[buffer] if held.kind == TEMPORARY else (held.kind, held.name)

    memory |= {(INPUT, str(number)): "given" for number in range(len(case.given))}
    sections = iter(chain.sections)
    fresh: set[int] = set()
    for piece in case.pieces:
        if piece.traced is None:
            seen += [memory.get(where(made[n].place.buffer)) if n in made else "given" for n in piece.inputs]
            continue
        section = next(sections)
        for event in traced.events[section.start : section.stop]:
            touched = list(dict.fromkeys(arg.buffer for arg in event.arguments if isinstance(arg, Place)))  # type: ignore[union-attr]
            for i in touched:  # what nobody wrote yet holds nothing of its own
                if traced.buffers[i].kind == TEMPORARY and i not in fresh:
                    fresh.add(i)
                    memory.pop(where(i), None)
            written = hash(tuple(memory.get(where(i)) for i in touched))
            taken = {t.place.buffer for t in section.inputs}
            own = {i: number for number, i in enumerate(touched) if traced.buffers[i].kind == TEMPORARY and i not in taken}
            memory.update({where(i): (written, number) for i, number in own.items()})
        made.update(zip(piece.outputs, section.outputs, strict=True))
    return [*seen, *["given" if name in case.given else memory.get(where(made[name].place.buffer)) for name in case.outputs]]


@given(cases())
def test_the_merged_program_computes_what_the_regions_do(case: Case) -> None:
    chain = merge(KEY, case.pieces, case.given, case.outputs)
    found = plan(chain.traced)
    check_plan(chain.traced, found)
    assert together(case, chain, found) == apart(case)


@given(cases(), st.data())
def test_an_overlap_of_any_two_lives_is_caught(case: Case, data: st.DataObject) -> None:
    chain = merge(KEY, case.pieces, case.given, case.outputs)
    found, lives = plan(chain.traced), lifetimes(chain.traced)
    pairs = [(a, b) for a in lives for b in lives if a.buffer != b.buffer and a.first <= b.last and b.first <= a.last]
    assume(pairs)
    a, b = data.draw(st.sampled_from(pairs))
    offsets: Mapping[int, int] = {**found.offsets, a.buffer: found.offsets[b.buffer]}
    with raises("arena-overlap"):
        check_plan(chain.traced, replace(found, offsets=offsets, arena=1 << 20))
