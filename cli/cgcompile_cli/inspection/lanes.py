"""Draws the edges of a recording as lanes beside the list of nodes, as version control draws branches.  Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .nodes import NodeRow


class LaneRow(NamedTuple):
    """The row of one node: its `lane`; `passing` lanes continue to later rows; `arriving` lanes lead into it from the row above;
    `leaving`: a later node waits for it."""

    lane: int
    passing: tuple[int, ...]
    arriving: tuple[int, ...]
    leaving: bool


def lanes(nodes: Sequence[NodeRow]) -> list[LaneRow]:
    """Returns a row per node.  A node uses its lane until the last node that waits for it; then another node may use the lane."""
    last: dict[int, int] = {}
    for position, node in enumerate(nodes):
        last.update(dict.fromkeys(node.after, position))
    sources: dict[int, int] = {}  # lane -> number of its source node
    rows = []
    for position, node in enumerate(nodes):
        arriving = tuple(sorted(lane for lane, source in sources.items() if source in node.after))
        sources = {lane: source for lane, source in sources.items() if last[source] > position}
        passing = tuple(sorted(sources))
        lane = next(candidate for candidate in (*arriving, *range(len(sources) + 1)) if candidate not in sources)
        leaving = node.number in last
        if leaving:
            sources[lane] = node.number
        rows.append(LaneRow(lane, passing, arriving, leaving))
    return rows
