"""Captured graphs with branches and loops between them become one list of rows, and back. Two takes (lists of two processes) become
one recording."""

from __future__ import annotations

from dataclasses import replace
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgbundle.format.table import Table, launch_order
from cgbundle.validate.module_state import Address
from cgbundle.validate.recordings import check_recording
from cgcompile.bundle import recordings as codec
from cgcompile.bundle.recordings import ConditionalNode, KernelNode, MemsetNode, Recording
from cgcompile.capture.assemble import assemble, has_conditions
from cgcompile.capture.rows import Mark, Piece, join, marks_and_graphs
from cgcompile.capture.take import RawBegin, RawEmpty, RawEnd, RawGraph, RawMemset, RawNextBody, RawRow, RawSetCondition, Take, Word
from tests.helpers.bundles.conditional_rows import function
from tests.helpers.bundles.recordings import IMAGE, MEMORIES
from tests.helpers.raising import raises
from tests.pure.capture.test_relocation import A_BASE, ARENA, B_BASE, KEY, MEGA, Process

EDGE = (0, 0, 0)


def fill(number: int) -> RawMemset:
    """Returns a fill with this value, which identifies it."""
    return RawMemset(target=Word(at=0, readings=()), shape=(number, 1, 1, 1, 0))


@st.composite
def captured(draw: st.DrawFn) -> Piece:
    """Draws a captured graph of any shape. Its edges go to later nodes."""
    count = draw(st.integers(0, 5))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return tuple([fill(0)] * count), tuple([(a, b, *EDGE) for a, b in edges])


@st.composite
def regions(draw: st.DrawFn, depth: int = 0) -> list[Piece]:
    """Draws graphs, branches and loops in the order of execution, bodies included. The conditionals have no numbers yet."""
    pieces: list[Piece] = []
    for _ in range(draw(st.integers(0, 3))):
        pieces.append(draw(captured()))
        if depth < 3 and draw(st.booleans()):
            bodies = draw(st.integers(1, 2))
            loop = bodies == 1 and draw(st.booleans())
            setter = ((RawSetCondition(conditional=-1, byte=Word(at=0, readings=())),), ())
            pieces += [setter, ((RawBegin(conditional=-1, type="while" if loop else "if"),), ())]
            for number in range(bodies):
                pieces += [((RawNextBody(conditional=-1),), ())] if number else []
                pieces += draw(regions(depth=depth + 1))
            pieces += [*([setter] if loop else []), ((RawEnd(conditional=-1),), ())]
    return pieces


def numbered(pieces: list[Piece], process: Process) -> list[Piece]:
    """Returns the pieces with numbered conditionals and fills, at addresses of a process."""
    numbered_pieces: list[Piece] = []
    open_: list[tuple[int, str]] = []
    conditionals = fills = 0
    for rows, edges in pieces:
        row = rows[0] if rows else None
        if isinstance(row, RawSetCondition):
            following = pieces[len(numbered_pieces) + 1][0][0]
            number = conditionals if isinstance(following, RawBegin) else open_[-1][0]
            row = replace(row, conditional=number, byte=process.word(process.segments[0] + 512 + number))
        elif isinstance(row, RawBegin):
            open_.append((conditionals, row.type))
            row, conditionals = replace(row, conditional=conditionals), conditionals + 1
        elif isinstance(row, RawNextBody):
            row = replace(row, conditional=open_[-1][0])
        elif isinstance(row, RawEnd):
            row = replace(row, conditional=open_.pop()[0])
        else:
            target = process.word(process.segments[0] + 1024)
            rows = tuple([RawMemset(target=target, shape=(fills + i, 1, 1, 1, 0)) for i in range(len(rows))])
            fills += len(rows)
            numbered_pieces.append((rows, edges))
            continue
        numbered_pieces.append(((row,), edges))
    return numbered_pieces


def taken(process: Process, pieces: list[Piece]) -> Take:
    rows, edges = join(numbered(pieces, process))
    return process.take(*rows, edges=edges)  # type: ignore[arg-type]


@given(st.lists(captured(), max_size=4))
@settings(max_examples=100, deadline=None)
def test_graphs_that_follow_each_other_run_one_after_the_other(pieces: list[Piece]) -> None:
    rows, edges = join(pieces)
    assert len(rows) == sum(len(piece_rows) for piece_rows, _ in pieces)
    before: dict[int, set[int]] = {}
    for source, target, *_ in sorted(edges, key=lambda edge: edge[1]):
        before.setdefault(target, set()).update({source} | before.get(source, set()))
    begin = 0
    for piece_rows, _ in pieces:
        for i in range(begin, begin + len(piece_rows)):
            assert before.get(i, set()) >= set(range(begin)), "behind all of the earlier graphs"
        begin += len(piece_rows)


@given(regions())
@settings(max_examples=150, deadline=None)
def test_two_takes_become_a_recording_that_runs_in_their_order(pieces: list[Piece]) -> None:
    a, b = (taken(Process(base), pieces) for base in (A_BASE, B_BASE))
    ((graph,),) = assemble(a, b, MEGA, conditions=function(IMAGE)).graphs.values()
    table = Table(codec.encode(graph.recording))
    check_recording(table, MEMORIES, {IMAGE})
    assert followed(graph.recording, table) == walked(list(a.graphs[0].nodes))
    assert has_conditions(a) == any(isinstance(row, RawSetCondition) for row in a.graphs[0].nodes)


def followed(recording: Recording, table: Table) -> list[object]:
    """Returns the actions of a recording in order, with every body once: the values of fills, and the addresses of conditions."""
    graphs: list[list[int]] = [[] for _ in table.spans()]
    for position in launch_order(table):
        graphs[table.graph(position)].append(position)

    def of(number: int) -> list[object]:
        actions: list[object] = []
        fills: list[int] = []
        for position in [*graphs[number], -1]:
            node = recording.nodes[position] if position >= 0 else None
            if isinstance(node, MemsetNode):
                fills.append(node.value)
                continue
            actions += [sorted(fills)] if fills else []
            fills = []
            if isinstance(node, KernelNode):
                actions.append(("condition", node.relocations[0].target))
            elif isinstance(node, ConditionalNode):
                actions.append((node.type, [of(body + 1) for body in node.bodies]))
        return actions

    return of(0)


def walked(rows: list[RawRow]) -> list[object]:
    """Returns the same as `followed`, for the rows of a take."""
    stack: list[list[list[object]]] = [[[]]]
    types: list[str] = []
    for row in rows:
        current = stack[-1][-1]
        if isinstance(row, RawMemset):
            if not current or not isinstance(current[-1], list):
                current.append([])
            current[-1].append(row.shape[0])  # type: ignore[attr-defined]
        elif isinstance(row, RawSetCondition):
            current.append(("condition", Address(memory=ARENA, offset=row.byte.readings[0].offset)))
        elif isinstance(row, RawBegin):
            types.append(row.type)
            stack.append([[]])
        elif isinstance(row, RawNextBody):
            stack[-1].append([])
        elif isinstance(row, RawEnd):
            bodies = stack.pop()
            bodies = bodies[:1] if len(bodies) == 2 and not bodies[1] else bodies
            stack[-1][-1].append((types.pop(), bodies))
    return stack[0][0]


def test_a_region_without_branches_is_its_graph() -> None:
    p = Process(A_BASE)
    nodes = [p.kernel(pack("<Q", p.weights)), RawEmpty(), p.kernel(pack("<Q", p.inputs))]
    edges = ((0, 2, 0, 1, 1), (0, 1, *EDGE))
    assert join([(tuple(nodes), edges)]) == (tuple(nodes), edges)
    graph = RawGraph(key=KEY, nodes=tuple(nodes), edges=edges, inputs=(), outputs=())
    ((begin, graph_nodes, among),) = marks_and_graphs(graph)
    assert (begin, graph_nodes, tuple(among)) == (0, nodes, edges)


def test_a_condition_at_another_place_is_refused() -> None:
    takes = []
    for base, at in ((A_BASE, 0), (B_BASE, 8)):
        p = Process(base)
        setter = RawSetCondition(conditional=0, byte=p.word(p.weights + at))
        rows: list[RawRow] = [setter, RawBegin(conditional=0, type="if"), RawEnd(conditional=0)]
        takes.append(p.take(*rows))  # type: ignore[arg-type]
    with raises("address-disagrees", match=r"node 0 \(condition\) is an address in both recordings"):
        assemble(*takes, MEGA, conditions=function(IMAGE))


@pytest.mark.parametrize("mark", [RawBegin(conditional=0, type="while"), RawEnd(conditional=1), RawNextBody(conditional=0)])
def test_another_branch_or_loop_is_a_difference(mark: Mark) -> None:
    takes = []
    for base, row in ((A_BASE, RawBegin(conditional=0, type="if")), (B_BASE, mark)):
        p = Process(base)
        takes.append(p.take(row))  # type: ignore[arg-type]
    with raises("recordings-differ", match="node 0"):
        assemble(*takes, MEGA)
