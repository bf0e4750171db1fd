"""One test for each defect of a recording's conditional nodes, their bodies and handles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cgbundle.errors import BundleError
from cgbundle.format import limits
from cgbundle.format.table import Table
from cgbundle.validate.recordings import check_recording
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import ConditionalNode, Edge, EmptyNode, Handle, KernelNode, Node, Recording
from tests.helpers.bundles.conditional_rows import FLAG, TURNS, chained, fill, recording, setter, several, switching
from tests.helpers.bundles.recordings import IMAGE, MEMORIES
from tests.helpers.raising import raises

ROWS = recording(IMAGE)
WHERE = "graphs/g0-8.bin"
LOOP, BEFORE_BRANCH, BRANCH, CHOICE = 2, 3, 4, 8
"""Positions of the loop, of the node that sets the branch's condition, of the branch, and of the branch in the loop."""


def check(recording: Recording) -> None:
    check_recording(Table(tables.encode(recording), WHERE), MEMORIES, {IMAGE})


def with_node(position: int, node: Node) -> Recording:
    nodes = list(ROWS.nodes)
    nodes[position] = node
    return replace(ROWS, nodes=tuple(nodes))


def with_setter(position: int, **changes: object) -> Recording:
    node = ROWS.nodes[position]
    assert isinstance(node, KernelNode)
    return with_node(position, replace(node, **changes))  # type: ignore[arg-type]


def test_sound_ones_pass_and_survive() -> None:
    check(ROWS)
    assert tables.decode(tables.encode(ROWS)) == ROWS
    assert [Table(tables.encode(ROWS)).graph(place) for place in (0, 4, 5, 13, 14, 15, 16, 17)] == [0, 0, 1, 1, 2, 3, 4, 5]


def test_a_body_may_be_empty() -> None:
    check(chained(IMAGE, [[setter(0, FLAG), ConditionalNode(type="if", bodies=(0, 1))], [], [fill(FLAG, 0)]]))


def test_a_switch_has_as_many_bodies_as_a_byte_tells_apart() -> None:
    rows = switching(IMAGE)
    for nodes in (rows, several(IMAGE, 8, nested=False), several(IMAGE, 8, nested=True)):
        check(nodes)
    assert tables.decode(tables.encode(rows)) == rows
    nodes = [setter(0, FLAG), ConditionalNode(type="switch", bodies=tuple(range(257)))]
    with raises("table-invalid", match=r"nodes\[1\].bodies: 257, expected 1 to 256"):
        check(chained(IMAGE, [nodes, *[[] for _ in range(257)]]))


DEFECTS: dict[str, tuple[Callable[[], Recording], str]] = {
    "no body": (
        lambda: chained(IMAGE, [[setter(0, FLAG), ConditionalNode(type="if", bodies=())]]),
        r"nodes\[1\].bodies: 0, expected 1 to 2",
    ),
    "a body twice": (lambda: with_node(BRANCH, ConditionalNode(type="if", bodies=(1, 1))), "each body once and in order"),
    "another's body": (lambda: with_node(BRANCH, ConditionalNode(type="if", bodies=(3, 4))), "each body once and in order"),
    "a loop with two": (
        lambda: chained(IMAGE, [[setter(0, TURNS), ConditionalNode(type="while", bodies=(0, 1))], [setter(0, TURNS)], []]),
        r"nodes\[1\].bodies: 2, expected 1 to 1",
    ),
    "itself": (
        lambda: replace(chained(IMAGE, [[], [setter(0, TURNS), ConditionalNode(type="while", bodies=(0,))]])),
        r"nodes\[1\].bodies: body 0 holds the node itself",
    ),
    "an earlier one": (
        lambda: chained(
            IMAGE,
            [
                [setter(0, TURNS), ConditionalNode(type="if", bodies=(0,))],
                [],
                [setter(1, TURNS), ConditionalNode(type="if", bodies=(1,))],
            ],
        ),
        r"nodes\[3\].bodies: body 1 holds the node itself",
    ),
    "no setter": (
        lambda: with_setter(BEFORE_BRANCH, handles=(Handle(at=8, conditional=0),)),
        "2 kernels set its condition before it",
    ),
    "a setter of another graph": (lambda: with_node(14, setter(1, FLAG)), r"nodes\[14\].handles: sets the condition of node 4"),
    "a handle of another body": (lambda: with_node(12, setter(1, TURNS)), r"nodes\[12\].handles: sets the condition of node 4"),
    "no next turn": (lambda: with_node(13, EmptyNode()), "0 kernels set its condition in its body"),
    "no edge": (
        lambda: replace(ROWS, edges=tuple([edge for edge in ROWS.edges if edge.target != BRANCH])),
        r"nodes\[4\]: no edge from node 3",
    ),
    "an edge between graphs": (
        lambda: replace(ROWS, edges=(*ROWS.edges, Edge(source=0, target=6, from_port=0, to_port=0, type=0))),
        "joins nodes 0 and 6 of two graphs",
    ),
    "the handle elsewhere": (lambda: with_setter(BEFORE_BRANCH, handles=(Handle(at=0, conditional=1),)), "the handle at byte 0"),
    "two handles": (
        lambda: with_setter(BEFORE_BRANCH, handles=(Handle(at=0, conditional=1), Handle(at=8, conditional=1))),
        "a kernel has two handles",
    ),
    "no handle": (lambda: with_setter(BEFORE_BRANCH, handles=()), "sets a condition without a handle"),
    "another kernel": (
        lambda: replace(ROWS, functions=(replace(ROWS.functions[0], symbol="other"),)),
        "has a handle and is not cgcompile_set_condition",
    ),
    "other parameters": (
        lambda: replace(ROWS, functions=(replace(ROWS.functions[0], params=((0, 8),)),)),
        r"functions\[0\].params",
    ),
    "no byte": (lambda: with_setter(BEFORE_BRANCH, relocations=()), "expected the byte's address alone"),
    "more than a thread": (lambda: with_setter(BEFORE_BRANCH, threads=(2, 1, 1)), "expected a single thread"),
    "other bytes": (lambda: with_setter(BEFORE_BRANCH, block=bytes(15) + b"\1"), "of 16 bytes of zeros"),
    "undefined bytes": (lambda: with_setter(BEFORE_BRANCH, undefined=((8, 8),)), "undefined: expected none"),
    "bodies that fall": (lambda: replace(ROWS, bodies=(14, 5, 15, 16, 17)), "must rise"),
    "a body behind the end": (lambda: replace(ROWS, bodies=(5, 14, 15, 16, 99)), "must rise"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_refused(defect: str) -> None:
    make, message = DEFECTS[defect]
    with raises("table-invalid", match=message) as caught:
        check(make())
    assert str(caught.value).startswith(f"{WHERE}: ") and "\n" not in str(caught.value)


def test_bodies_inside_each_other_are_limited() -> None:
    def nested(depth: int) -> Recording:
        inner: list[list[Node]] = [[setter(number, FLAG), ConditionalNode(type="if", bodies=(number,))] for number in range(depth)]
        return chained(IMAGE, [*inner, []])

    check(nested(limits.BODY_DEPTH))
    with raises("table-invalid", match="more than 64 inside each other"):
        check(nested(limits.BODY_DEPTH + 1))


def test_a_table_has_one_encoding() -> None:
    """A table without conditional nodes has the layout of tables from before there were conditional nodes."""
    data = bytearray(tables.encode(replace(ROWS, nodes=(), edges=(), bodies=())))
    assert data[8] == 1
    assert tables.encode(ROWS)[8] == 2
    with raises("table-invalid", match="bodies or handles without a conditional node"):
        tables.encode(replace(ROWS, nodes=(fill(0, 1),), edges=(), bodies=(1,)))


def test_every_byte_may_be_damaged() -> None:
    """A damaged table that is accepted gives its own bytes when it is encoded again."""
    data = tables.encode(ROWS)
    for position in range(len(data)):
        for flip in (0x01, 0x80):
            damaged = bytearray(data)
            damaged[position] ^= flip
            try:
                recording = tables.decode(bytes(damaged))
                check_recording(Table(bytes(damaged)), MEMORIES, {IMAGE})
            except BundleError:
                continue
            assert tables.encode(recording) == bytes(damaged)
