"""The lowest driver that takes a graph, by the kinds of its nodes and edges."""

from __future__ import annotations

from collections.abc import Iterable

from cgcompile.bundle.recordings import ConditionalNode, Recording

EDGES, LOOPS, BRANCHES = 12030, 12040, 12080
"""The lowest drivers that take an edge with data; a loop, or an "if" with one body in a body; an "if" with two bodies or a "switch"
(12040 = 12.4; CUDA's release notes)."""


def graph_driver(recordings: Iterable[Recording]) -> int:
    """As drivers count, 0 where any does."""
    lowest = 0
    for recording in recordings:
        conditionals = [node for node in recording.nodes if isinstance(node, ConditionalNode)]
        needed = [BRANCHES if node.type == "switch" or len(node.bodies) > 1 else LOOPS for node in conditionals]
        needed += [EDGES for edge in recording.edges if edge.from_port or edge.type]
        lowest = max([lowest, *needed])
    return lowest
