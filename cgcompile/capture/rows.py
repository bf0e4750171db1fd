"""The graphs that were captured of a region, with its branches and loops between them, as one list of rows; and back.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .take import RawBegin, RawEdge, RawEnd, RawGraph, RawNextBody, RawNode, RawRow, RawSetCondition

Mark = RawSetCondition | RawBegin | RawNextBody | RawEnd
Piece = tuple[tuple[RawRow, ...], tuple[RawEdge, ...]]
"""Rows, and the edges that join them, by their positions."""


def join(pieces: Sequence[Piece]) -> Piece:
    """Pieces in order, each behind the one before it: a mark alone, or a captured graph."""
    rows: list[RawRow] = []
    edges: list[RawEdge] = []
    last: list[int] = []
    for piece_rows, among in pieces:
        begin = len(rows)
        if not piece_rows or isinstance(piece_rows[0], Mark):
            last = [] if piece_rows else last
            rows += piece_rows
            continue
        targets, sources = {edge[1] for edge in among}, {edge[0] for edge in among}
        edges += [(a, begin + b, 0, 0, 0) for a in last for b in range(len(piece_rows)) if b not in targets]
        edges += _moved(among, begin)
        last = [begin + a for a in range(len(piece_rows)) if a not in sources]
        rows += piece_rows
    return tuple(rows), tuple(edges)


def marks_and_graphs(graph: RawGraph) -> Iterator[tuple[int, Mark | Sequence[RawNode], Sequence[RawEdge]]]:
    """The rows of a graph in order: the position of a mark and the mark, or that of a captured graph's first node, its nodes, and
    the edges among these by their positions in it."""
    rows = graph.nodes
    begins = [0, *[i + 1 for i, row in enumerate(rows) if isinstance(row, Mark)]]
    ends = [*[i for i, row in enumerate(rows) if isinstance(row, Mark)], len(rows)]
    for begin, end in zip(begins, ends, strict=True):
        among = graph.edges
        if begin or end < len(rows):
            among = _moved([edge for edge in graph.edges if begin <= edge[0] < end], -begin)
        if begin < end:
            yield begin, [row for row in rows[begin:end] if not isinstance(row, Mark)], among
        if end < len(rows):
            mark = rows[end]
            assert isinstance(mark, Mark)
            yield end, mark, ()


def _moved(edges: Sequence[RawEdge], by: int) -> tuple[RawEdge, ...]:
    return tuple([(source + by, target + by, out, into, kind) for source, target, out, into, kind in edges])
