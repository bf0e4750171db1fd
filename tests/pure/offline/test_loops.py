"""Branches and loops of lowered programs: the arena plan keeps values that later turns of a loop read, and bodies become rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgbundle.format.table import Table
from cgbundle.validate.recordings import check_recording
from cgcompile.bundle import recordings as codec
from cgcompile.bundle.recordings import ConditionalNode, KernelNode, MemsetNode, Recording
from cgcompile.offline.assemble.arena import Plan, lifetimes, plan
from cgcompile.offline.assemble.plan_check import check_plan
from cgcompile.offline.lowered import TEMPORARY, Begin, Buffer, End, Event, Fill, HostRead, Lowered, NextBody, Pointer, SetCondition
from cgcompile.targets.cuda.bodies import Bodies
from cgcompile.targets.memory_layout import PAD
from tests.helpers.bundles.conditional_rows import fill, function, setter
from tests.helpers.bundles.recordings import IMAGE, MEMORIES
from tests.helpers.raising import raises

BUFFERS, SIZE = 6, 256

BODIES = {"loop": "while", "branch": "if"}

Statement = tuple[str, object]
"""("write", buffer), ("read", buffer), ("loop", statements) or ("branch", statements)."""

simple = st.tuples(st.sampled_from(("write", "read")), st.integers(0, BUFFERS - 1))
nested = st.recursive(
    st.lists(simple, max_size=6),
    lambda inner: st.lists(st.one_of(simple, st.tuples(st.just("loop"), inner)), max_size=5),
    max_leaves=24,
)
programs: st.SearchStrategy[list[Statement]] = nested  # type: ignore[assignment]


def write(buffer: int) -> Fill:
    return Fill(target=Pointer(buffer=buffer, offset=0), value=0, element=1, count=SIZE)


def lowered(statements: list[Statement]) -> Lowered:
    """Returns the statements as events. The first read of an unwritten buffer becomes a write."""
    events: list[Event] = []
    known: set[int] = set()
    loops = iter(range(100))

    def add(rows: list[Statement]) -> None:
        for kind, what in rows:
            if kind in BODIES:
                number = next(loops)
                events.append(Begin(conditional=number, type=BODIES[kind]))
                add(what)  # type: ignore[arg-type]
                events.append(End(conditional=number))
            else:
                assert isinstance(what, int)
                events.append(HostRead(buffer=what) if kind == "read" and what in known else write(what))
                known.add(what)

    add(statements)
    buffers = tuple([Buffer(kind=TEMPORARY, name=f"b{number}", nbytes=SIZE) for number in range(BUFFERS)])
    return Lowered(key=(1,), buffers=buffers, variants=(), events=tuple(events), inputs=(), outputs=())


def run(program: Lowered, planned: Plan) -> bool:
    """Returns whether every read finds the last write to its buffer. Each loop runs twice."""
    holds: dict[int, int] = {}
    ends = {begin: end for begin, end in spans(program.events)}

    def go(begin: int, end: int) -> bool:
        at = begin
        while at < end:
            event = program.events[at]
            if isinstance(event, Begin):
                if not (go(at + 1, ends[at]) and go(at + 1, ends[at])):
                    return False
                at = ends[at]
            elif isinstance(event, Fill):
                holds[planned.offsets[event.target.buffer]] = event.target.buffer
            elif isinstance(event, HostRead) and holds.get(planned.offsets[event.buffer]) != event.buffer:
                return False
            at += 1
        return True

    return go(0, len(program.events))


def spans(events: tuple[Event, ...]) -> list[tuple[int, int]]:
    begins, pairs = [], []
    for place, event in enumerate(events):
        if isinstance(event, Begin):
            begins.append(place)
        elif isinstance(event, End):
            pairs.append((begins.pop(), place))
    return pairs


@given(programs)
@settings(max_examples=200, deadline=None)
def test_what_a_turn_needs_is_there_in_the_next(statements: list[Statement]) -> None:
    program = lowered(statements)
    planned = plan(program)
    check_plan(program, planned)
    assert run(program, planned)


@given(programs, st.permutations(range(BUFFERS)), st.integers(1, BUFFERS))
@settings(max_examples=200, deadline=None)
def test_the_check_refuses_what_would_go_wrong(statements: list[Statement], order: list[int], places: int) -> None:
    program = lowered(statements)
    planned = Plan(offsets={buffer: order[buffer] % places * SIZE for buffer in range(BUFFERS)}, arena=places * SIZE + 256, bound=0)
    if not run(program, planned):
        with raises("arena-overlap"):
            check_plan(program, planned)


@pytest.mark.parametrize(
    ("statements", "together"),
    [
        ([("write", 0), ("read", 0), ("write", 1)], False),
        ([("write", 0), ("loop", [("read", 0), ("write", 1)])], True),  # the next turn reads 0
        ([("loop", [("write", 1), ("write", 0)]), ("read", 0)], True),  # the next turn would overwrite 0 with 1
        ([("write", 0), ("loop", [("write", 1)]), ("read", 0)], True),
        ([("loop", [("write", 0), ("read", 0), ("write", 1)])], False),  # every turn starts with a write
        ([("write", 0), ("loop", [("write", 1)])], False),
        ([("loop", [("write", 0)]), ("write", 1)], False),
        ([("write", 0), ("branch", [("read", 0), ("write", 1)])], False),  # a branch has no next turn
        ([("branch", [("write", 1), ("write", 0)]), ("read", 0)], False),
        ([("write", 0), ("branch", [("loop", [("read", 0), ("write", 1)])])], True),
        ([("write", 0), ("loop", [("branch", [("read", 0)]), ("write", 1)])], True),
        ([("write", 0), ("loop", [("loop", [("read", 0)]), ("write", 1)])], True),
        ([("loop", [("write", 1), ("loop", [("write", 0)])]), ("read", 0)], True),
        ([("write", 0), ("loop", [("read", 0)]), ("loop", [("write", 1)])], False),
    ],
)
def test_buffers_share_memory_if_no_turn_needs_both(statements: list[Statement], together: bool) -> None:
    """Checks both the plan and the check of plans: two buffers may share memory only if no turn of a loop needs both."""
    program = lowered(statements)
    assert plan(program).arena == SIZE * (1 + together) + PAD
    shared = Plan(offsets=dict.fromkeys(range(BUFFERS), 0), arena=SIZE + PAD, bound=0)
    if together:
        with raises("arena-overlap"):
            check_plan(program, shared)
    else:
        check_plan(program, shared)


@given(programs)
@settings(max_examples=100, deadline=None)
def test_the_check_comes_to_the_plans_lifetimes_by_a_way_of_its_own(statements: list[Statement]) -> None:
    program = lowered(statements)
    lives = {lifetime.buffer: lifetime for lifetime in lifetimes(program)}
    for one, other in combinations(sorted(lives), 2):
        offsets = {buffer: buffer * SIZE for buffer in range(BUFFERS)} | {other: one * SIZE}
        planned = Plan(offsets=offsets, arena=BUFFERS * SIZE + PAD, bound=0)
        if lives[one].first <= lives[other].last and lives[other].first <= lives[one].last:
            with raises("arena-overlap"):
                check_plan(program, planned)
        else:
            check_plan(program, planned)


def test_an_inner_loops_reader_lives_through_the_outer_one() -> None:
    program = lowered([("write", 0), ("loop", [("write", 1), ("loop", [("read", 0)]), ("write", 2)]), ("write", 3)])
    (first,) = [lifetime for lifetime in lifetimes(program) if lifetime.buffer == 0]
    assert (first.first, first.last) == (0, 7)


def rows(build: Callable[[Bodies], None]) -> Recording:
    bodies = Bodies()
    build(bodies)
    nodes, edges, begins = bodies.rows()
    return Recording(key=(), functions=(function(IMAGE),), nodes=nodes, edges=edges, bodies=begins)


def test_bodies_stand_behind_those_that_come_before_them() -> None:
    def build(builder: Bodies) -> None:
        builder.add([setter(7, 0)])
        builder.begin(7, "if")
        builder.add([fill(0, 1)])
        builder.add([setter(5, 0)])
        builder.begin(5, "while")
        builder.add([setter(5, 0)])
        builder.end()
        builder.next_body()
        builder.end()
        builder.add([setter(9, 1)])
        builder.begin(9, "if")
        builder.next_body()
        builder.add([fill(0, 2)])
        builder.end()

    recording = rows(build)
    check_recording(Table(codec.encode(recording)), MEMORIES, {IMAGE})
    conditionals = [node for node in recording.nodes if isinstance(node, ConditionalNode)]
    assert conditionals == [
        ConditionalNode(type="if", bodies=(0,)),
        ConditionalNode(type="if", bodies=(1, 2)),
        ConditionalNode(type="while", bodies=(3,)),
    ]
    handles = [node.handles[0].conditional for node in recording.nodes if isinstance(node, KernelNode)]
    assert handles == [0, 1, 2, 2]
    assert recording.bodies == (4, 7, 7, 8)
    assert [node.value for node in recording.nodes if isinstance(node, MemsetNode)] == [1, 2]


@pytest.mark.parametrize("event", [SetCondition(conditional=0, byte=Pointer(buffer=0, offset=0)), NextBody(conditional=0)])
def test_the_plan_knows_every_event(event: Event) -> None:
    """For example, the byte of a condition is needed until the condition is read."""
    program = lowered([("write", 0), ("write", 1)])
    program = replace(program, events=(*program.events, event))
    last_uses = {lifetime.buffer: lifetime.last for lifetime in lifetimes(program)}
    assert last_uses[0] == (2 if isinstance(event, SetCondition) else 0)
    check_plan(program, plan(program))
