"""The edges of a recording as lanes beside a list of its nodes, as version control draws branches.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .nodes import NodeRow


class LaneRow(NamedTuple):
    """Beside one node: the `lane` of it; `passing` lanes run on to later rows; `arriving` lanes lead into it from the row above;
    `leaving`: a later node waits for it."""

    lane: int
    passing: tuple[int, ...]
    arriving: tuple[int, ...]
    leaving: bool


def lanes(nodes: Sequence[NodeRow]) -> list[LaneRow]:
    """A row per node.  A node's own lane runs on until the last node that waits for it; then another may take it."""
    last: dict[int, int] = {}
    for position, node in enumerate(nodes):
        last.update(dict.fromkeys(node.after, position))
    held: dict[int, int] = {}  # lane -> the number of the node that it comes from
    rows = []
    for position, node in enumerate(nodes):
        arriving = tuple(sorted(lane for lane, source in held.items() if source in node.after))
        held = {lane: source for lane, source in held.items() if last[source] > position}
        passing = tuple(sorted(held))
        lane = next(candidate for candidate in (*arriving, *range(len(held) + 1)) if candidate not in held)
        leaving = node.number in last
        if leaving:
            held[lane] = node.number
        rows.append(LaneRow(lane, passing, arriving, leaving))
    return rows
