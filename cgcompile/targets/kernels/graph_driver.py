"""The lowest driver version that supports a graph, from the kinds of its nodes and edges."""

from __future__ import annotations

from collections.abc import Iterable

from cgcompile.bundle.recordings import ConditionalNode, Recording

EDGES, LOOPS, BRANCHES = 12030, 12040, 12080
"""The lowest driver versions (12040 = 12.4; CUDA's release notes): for an edge with data, for a loop or an "if" with one body, and
for an "if" with two bodies or a "switch"."""


def graph_driver(recordings: Iterable[Recording]) -> int:
    """Returns the lowest driver version (12040 = 12.4), or 0 if every driver supports the graphs."""
    lowest = 0
    for recording in recordings:
        conditionals = [node for node in recording.nodes if isinstance(node, ConditionalNode)]
        needed = [BRANCHES if node.type == "switch" or len(node.bodies) > 1 else LOOPS for node in conditionals]
        needed += [EDGES for edge in recording.edges if edge.from_port or edge.type]
        lowest = max([lowest, *needed])
    return lowest
