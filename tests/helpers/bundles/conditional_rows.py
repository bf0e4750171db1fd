"""A recording with a loop, a branch inside the loop and a branch after it.

All nodes use memory `arena` only: copies, fills and the kernel that sets conditions. Tests run the recording on a GPU and against
`fake_driver`.

    while turns[0]: output = [5 if choices[0] else 3, *output]; turns, choices = turns[1:], choices[1:]
    result = 1 if flag else 2
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from cgbundle.format.table import SET_CONDITION
from cgbundle.validate.module_state import Address, Relocation
from cgcompile.bundle.recordings import ConditionalNode, Edge, Function, Handle, KernelNode, MemcpyNode, MemsetNode, Node, Recording

ARENA = 3
ROW = 32
TURNS, CHOICES, SPARE, OUTPUT, FLAG, RESULT = 0, 32, 64, 96, 128, 129
"""Offsets in the arena: three rows of bytes, a spare row for copies, the output row and two single bytes."""


def function(image: str) -> Function:
    return Function(image=image, symbol=SET_CONDITION, params=((0, 8), (8, 8)), attributes=())


def setter(conditional: int, offset: int, function: int = 0) -> KernelNode:
    return KernelNode(
        function=function,
        grid=(1, 1, 1),
        threads=(1, 1, 1),
        shared=0,
        block=bytes(16),
        relocations=(Relocation(at=0, target=Address(memory=ARENA, offset=offset)),),
        undefined=(),
        attributes=(),
        handles=(Handle(at=8, conditional=conditional),),
    )


def fill(offset: int, value: int, width: int = 1) -> MemsetNode:
    return MemsetNode(target=Address(memory=ARENA, offset=offset), value=value, element=1, width=width, height=1, pitch=0)


def copy(source: int, target: int) -> MemcpyNode:
    return MemcpyNode(
        source=Address(memory=ARENA, offset=source),
        target=Address(memory=ARENA, offset=target),
        width=ROW - 1,
        height=1,
        depth=1,
        source_pitch=ROW - 1,
        source_height=1,
        target_pitch=ROW - 1,
        target_height=1,
    )


def recording(image: str) -> Recording:
    """Returns the recording; the nodes of each graph form a chain."""
    outer_nodes: list[Node] = [
        fill(OUTPUT, 0, ROW),
        setter(0, TURNS),
        ConditionalNode(type="while", bodies=(0,)),
        setter(1, FLAG),
        ConditionalNode(type="if", bodies=(1, 2)),
    ]
    turn: list[Node] = [
        copy(OUTPUT, SPARE),
        copy(SPARE, OUTPUT + 1),
        setter(2, CHOICES),
        ConditionalNode(type="if", bodies=(3, 4)),
        copy(TURNS + 1, SPARE),
        copy(SPARE, TURNS),
        copy(CHOICES + 1, SPARE),
        copy(SPARE, CHOICES),
        setter(0, TURNS),
    ]
    return chained(image, [outer_nodes, turn, [fill(RESULT, 1)], [fill(RESULT, 2)], [fill(OUTPUT, 5)], [fill(OUTPUT, 3)]])


WAYS = 3
"""Number of bodies of the switch node below."""


def switching(image: str) -> Recording:
    """Returns a recording with a switch: the result is 10 + flag, or 9 if the switch has no body for the flag."""
    bodies = [[fill(RESULT, 10 + number)] for number in range(WAYS)]
    outer_nodes = [fill(RESULT, 9), setter(0, FLAG), ConditionalNode(type="switch", bodies=tuple(range(WAYS)))]
    return chained(image, [outer_nodes, *bodies])


def several(image: str, ways: int, *, nested: bool) -> Recording:
    """Returns a recording with `ways` bodies, each of which sets the result. Without `nested` a switch node selects the body by the
    flag. With `nested` the bodies are nested branches, which read the bytes of the choices."""
    if not nested:
        outer_nodes = [setter(0, FLAG), ConditionalNode(type="switch", bodies=tuple(range(ways)))]
        return chained(image, [outer_nodes, *[[fill(RESULT, 10 + number)] for number in range(ways)]])
    graphs: list[list[Node]] = []
    for number in range(ways - 1):
        node = ConditionalNode(type="if", bodies=(2 * number, 2 * number + 1))
        graphs += [[setter(number, CHOICES + number), node], [fill(RESULT, 10 + number)]]
    return chained(image, [*graphs, [fill(RESULT, 9 + ways)]])


def chained(image: str, graphs: Sequence[Sequence[Node]]) -> Recording:
    """Returns a recording of these graphs. The first one is the outer graph; the nodes of every graph form a chain."""
    nodes: list[Node] = []
    edges: list[Edge] = []
    begins = []
    for graph in graphs:
        begins.append(len(nodes))
        edges += [
            Edge(source=a, target=b, from_port=0, to_port=0, type=0)
            for a, b in pairwise(range(len(nodes), len(nodes) + len(graph)))
        ]
        nodes += graph
    return Recording(key=(), functions=(function(image),), nodes=tuple(nodes), edges=tuple(edges), bodies=tuple(begins[1:]))


def arena(choices: Sequence[int], flag: int) -> bytearray:
    """Returns the arena before a run with one turn for each choice."""
    data = bytearray(b"\xcd" * 256)
    for at, values in ((TURNS, [1] * len(choices)), (CHOICES, choices)):
        data[at : at + ROW] = bytes(values).ljust(ROW, b"\0")
    data[FLAG] = flag
    return data


def expected(choices: Sequence[int], flag: int) -> tuple[bytes, int]:
    """Returns the output row and the result byte after the run."""
    return bytes([5 if choice else 3 for choice in reversed(choices)]).ljust(ROW, b"\0"), 1 if flag else 2
