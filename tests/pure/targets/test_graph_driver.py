"""The lowest driver version that accepts a recording's nodes and edges."""

from __future__ import annotations

import pytest

from cgcompile.bundle.recordings import ConditionalNode, Edge, EmptyNode, Node, Recording
from cgcompile.targets.kernels.conditions import condition_source
from cgcompile.targets.kernels.graph_driver import graph_driver

PLAIN = Edge(source=0, target=1, from_port=0, to_port=0, type=0)
EARLY = Edge(source=0, target=1, from_port=1, to_port=0, type=1)


def recording(*nodes: Node, edges: tuple[Edge, ...] = ()) -> Recording:
    return Recording(key=(1,), functions=(), nodes=nodes, edges=edges, bodies=())


@pytest.mark.parametrize(
    ("recordings", "driver"),
    [
        ((), 0),
        ((recording(EmptyNode(), EmptyNode(), edges=(PLAIN,)),), 0),
        ((recording(EmptyNode(), EmptyNode(), edges=(PLAIN, EARLY)),), 12030),
        ((recording(ConditionalNode(type="while", bodies=(0,))),), 12040),
        ((recording(ConditionalNode(type="if", bodies=(0,))), recording(edges=(EARLY,))), 12040),
        ((recording(ConditionalNode(type="if", bodies=(0, 1))), recording()), 12080),
        ((recording(ConditionalNode(type="switch", bodies=(0,))),), 12080),
    ],
)
def test_what_needs_a_newer_driver(recordings: tuple[Recording, ...], driver: int) -> None:
    assert graph_driver(recordings) == driver


def test_the_kernel_that_sets_a_condition_waits_where_kernels_begin_early() -> None:
    assert "griddepcontrol" not in condition_source(80) and ".target sm_80" in condition_source(80)
    for capability in (90, 100):
        assert condition_source(capability).index("griddepcontrol.wait") < condition_source(capability).index("ld.global")
