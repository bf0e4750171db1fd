"""Joins a region's captured graphs, branches and loops into one list of rows, and splits such a list again.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .take import RawBegin, RawEdge, RawEnd, RawGraph, RawNextBody, RawNode, RawRow, RawSetCondition

Mark = RawSetCondition | RawBegin | RawNextBody | RawEnd
Piece = tuple[tuple[RawRow, ...], tuple[RawEdge, ...]]
"""Rows, and edges between them by row position."""


def join(pieces: Sequence[Piece]) -> Piece:
    """Concatenates pieces in execution order; a piece is one mark, or a captured graph.  Adds edges between two adjacent graphs:
    from the last nodes of the first to the first nodes of the second."""
    rows: list[RawRow] = []
    edges: list[RawEdge] = []
    last: list[int] = []
    for piece_rows, piece_edges in pieces:
        begin = len(rows)
        if not piece_rows or isinstance(piece_rows[0], Mark):
            last = [] if piece_rows else last
            rows += piece_rows
            continue
        targets, sources = {edge[1] for edge in piece_edges}, {edge[0] for edge in piece_edges}
        edges += [(a, begin + b, 0, 0, 0) for a in last for b in range(len(piece_rows)) if b not in targets]
        edges += _moved(piece_edges, begin)
        last = [begin + a for a in range(len(piece_rows)) if a not in sources]
        rows += piece_rows
    return tuple(rows), tuple(edges)


def marks_and_graphs(graph: RawGraph) -> Iterator[tuple[int, Mark | Sequence[RawNode], Sequence[RawEdge]]]:
    """Yields the marks and captured graphs among a graph's rows, in order.  For a mark: its position, the mark, ().  For a
    captured graph: the position of its first node, its nodes, and its edges by positions among those nodes."""
    rows = graph.nodes
    begins = [0, *[i + 1 for i, row in enumerate(rows) if isinstance(row, Mark)]]
    ends = [*[i for i, row in enumerate(rows) if isinstance(row, Mark)], len(rows)]
    for begin, end in zip(begins, ends, strict=True):
        piece_edges = graph.edges
        if begin or end < len(rows):
            piece_edges = _moved([edge for edge in graph.edges if begin <= edge[0] < end], -begin)
        if begin < end:
            yield begin, [row for row in rows[begin:end] if not isinstance(row, Mark)], piece_edges
        if end < len(rows):
            mark = rows[end]
            assert isinstance(mark, Mark)
            yield end, mark, ()


def _moved(edges: Sequence[RawEdge], by: int) -> tuple[RawEdge, ...]:
    return tuple([(source + by, target + by, out, into, kind) for source, target, out, into, kind in edges])
