"""A recording with a loop, a branch in it, and a branch behind it, over memory `arena` alone: copies, fills and the kernel that
sets conditions.  It runs on a GPU, and against `fake_driver`.

    while turns[0]: output = [5 if choices[0] else 3, *output]; turns, choices = turns[1:], choices[1:]
    result = 1 if flag else 2
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from cgbundle.tables.module_state import Address, Relocation
from cgbundle.tables.table import SET_CONDITION
from cgcompile.bundle.recordings import ConditionalNode, Edge, Function, Handle, KernelNode, MemcpyNode, MemsetNode, Node, Recording

ARENA = 3
ROW = 32
TURNS, CHOICES, SPARE, OUTPUT, FLAG, RESULT = 0, 32, 64, 96, 128, 129
"""Places in the arena: three rows of bytes, a row between copies, two bytes."""


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
    """The rows: in each graph one after the other."""
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
"""Bodies of the switch below."""


def switching(image: str) -> Recording:
    """Another recording: the result is 10 and the flag, 9 where the switch has no body of that number."""
    bodies = [[fill(RESULT, 10 + way)] for way in range(WAYS)]
    outer_nodes = [fill(RESULT, 9), setter(0, FLAG), ConditionalNode(type="switch", bodies=tuple(range(WAYS)))]
    return chained(image, [outer_nodes, *bodies])


def several(image: str, ways: int, *, nested: bool) -> Recording:
    """A switch of so many bodies on the flag, or a branch for each but the last inside of the other side of the one before it, on
    the bytes of the choices; a body that runs sets the result."""
    if not nested:
        outer_nodes = [setter(0, FLAG), ConditionalNode(type="switch", bodies=tuple(range(ways)))]
        return chained(image, [outer_nodes, *[[fill(RESULT, 10 + way)] for way in range(ways)]])
    graphs: list[list[Node]] = []
    for way in range(ways - 1):
        node = ConditionalNode(type="if", bodies=(2 * way, 2 * way + 1))
        graphs += [[setter(way, CHOICES + way), node], [fill(RESULT, 10 + way)]]
    return chained(image, [*graphs, [fill(RESULT, 9 + ways)]])


def chained(image: str, graphs: Sequence[Sequence[Node]]) -> Recording:
    """A recording of these graphs, the own one first, each a chain."""
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
    """The arena before a run of as many turns as there are choices."""
    data = bytearray(b"\xcd" * 256)
    for at, values in ((TURNS, [1] * len(choices)), (CHOICES, choices)):
        data[at : at + ROW] = bytes(values).ljust(ROW, b"\0")
    data[FLAG] = flag
    return data


def expected(choices: Sequence[int], flag: int) -> tuple[bytes, int]:
    """The output and the result after it."""
    return bytes([5 if choice else 3 for choice in reversed(choices)]).ljust(ROW, b"\0"), 1 if flag else 2
