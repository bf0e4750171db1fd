"""Merges recordings of a program with different lowerings: every int_key gets the graphs of its chosen lowering.

Weights, state and inputs have the same offsets in all recordings.  Each recording appends tables to memory `weights`, and reserves
ranges for donated outputs in front of the rest of memory `arena`.  Different tables are moved so that they do not overlap.  All
recordings get the same reserved ranges, and the rest of the arena is moved behind these.  Addresses of what was moved are changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cgbundle.format.schema import MEMORIES, DonatedRange, IntKey, Value
from cgbundle.validate.module_state import Address, ModuleState, Relocation
from cgcompile.bundle.recordings import KernelNode, MemcpyNode, MemsetNode, Node

from ...capture.placement import SEGMENT_ALIGN
from ...capture.recorder import Recorded
from ...targets.cuda.donations import reserved_end, reserved_parts
from ...targets.cuda.recorded import RecordedGraph
from ...targets.memory_layout import PAD, align

WEIGHTS, ARENA = MEMORIES.index("weights"), MEMORIES.index("arena")


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Adds `by` to offsets in a memory from byte `begin` up to the `begin` of the next move."""

    memory: int
    begin: int
    by: int


def beside_each_other(parts: Mapping[str, Recorded], weights_end: int) -> dict[str, Recorded]:
    """Moves tables so that they do not overlap.  Equal tables share an offset.  All recordings reserve the same arena ranges.

    `weights_end`: where the program's tensors end in memory `weights`, and the tables begin.
    """
    needs: dict[str, int] = {}
    for recorded in parts.values():
        for row in recorded.reserved:
            needs[row.entry] = max(needs.get(row.entry, 0), row.bytes - PAD)
    reserved = reserved_parts(needs, SEGMENT_ALIGN)
    table_offsets: dict[tuple[tuple[int, bytes], ...], int] = {}
    end, moves = weights_end, {}
    for name, recorded in parts.items():
        tables = tuple([(table.offset, table.contents) for table in recorded.tables])
        if tables and tables not in table_offsets:
            table_offsets[tables] = end - weights_end
            end = align(end + recorded.weights_bytes - PAD - weights_end)
        table_moves = [Move(memory=WEIGHTS, begin=weights_end, by=table_offsets[tables])] if tables else []
        moves[name] = (*table_moves, *_arena_moves(recorded.reserved, reserved))
    return {
        name: replace(_moved(recorded, moves[name]), reserved=reserved, weights_bytes=end + PAD) for name, recorded in parts.items()
    }


def conflicts(recordings: Mapping[str, Recorded]) -> set[frozenset[str]]:
    """Returns pairs of recordings (of `beside_each_other`) that need different contents of one module variable."""
    pairs, names = set(), list(recordings)
    for index, name in enumerate(names):
        states = {(state.image, state.symbol): state for state in recordings[name].states}
        for other in names[index + 1 :]:
            if any(states.get((state.image, state.symbol), state) != state for state in recordings[other].states):
                pairs.add(frozenset((name, other)))
    return pairs


def merged(recordings: Mapping[str, Recorded], chosen: Mapping[IntKey, str]) -> Recorded:
    """Returns one recording, with each key's graphs from its chosen one.  `recordings`: results of `beside_each_other`.  Each is
    chosen for at least one key; if no key has graphs, there is one recording."""
    first = next(iter(recordings.values()))
    graphs = {key: recordings[chosen[key]].graphs[key] for key in first.graphs}
    used = {function.image for key_graphs in graphs.values() for graph in key_graphs for function in graph.recording.functions}
    tables = {table.offset: table for recorded in recordings.values() for table in recorded.tables}
    states: dict[tuple[str, str], ModuleState] = {}
    for recorded in recordings.values():
        states |= {(state.image, state.symbol): state for state in recorded.states if state.image in used}
    replays = {
        key: recordings[name].replays[key]
        for key, name in {**dict.fromkeys(first.static, next(iter(recordings))), **chosen}.items()
        if key in recordings[name].replays
    }
    images = {name: image for recorded in recordings.values() for name, image in recorded.images.items() if name in used}
    return replace(
        first, graphs=graphs, replays=replays, tables=tuple([tables[offset] for offset in sorted(tables)]),
        states=tuple(states.values()), images=images, driver=max(recorded.driver for recorded in recordings.values()),
    )  # fmt: skip


def _arena_moves(ranges: Sequence[DonatedRange], shared: Sequence[DonatedRange]) -> tuple[Move, ...]:
    """Returns moves of each entry's reserved range to its shared range, and of the rest of the arena after these."""
    if not ranges:
        return ()
    new = {row.entry: row.offset for row in shared}
    begin = reserved_end(ranges)
    shift = align(reserved_end(shared) - begin, SEGMENT_ALIGN)
    parts = [Move(memory=ARENA, begin=row.offset, by=new[row.entry] - row.offset) for row in ranges]
    return (*parts, Move(memory=ARENA, begin=begin, by=shift))


def _moved(recorded: Recorded, moves: Sequence[Move]) -> Recorded:
    if not moves:
        return recorded
    end = max([move for move in moves if move.memory == ARENA], key=lambda move: move.begin, default=None)
    grown = end.by if end else 0

    def graph(original: RecordedGraph) -> RecordedGraph:
        recording = replace(original.recording, nodes=tuple([_node(node, moves) for node in original.recording.nodes]))
        inputs, outputs = (tuple([_value(value, moves) for value in side]) for side in (original.inputs, original.outputs))
        return replace(original, recording=recording, inputs=inputs, outputs=outputs, arena=original.arena + grown)

    return replace(
        recorded,
        graphs={key: tuple([graph(region_graph) for region_graph in key_graphs]) for key, key_graphs in recorded.graphs.items()},
        tables=tuple([replace(table, offset=_offset(WEIGHTS, table.offset, moves)) for table in recorded.tables]),
        states=tuple([replace(state, relocations=_relocations(state.relocations, moves)) for state in recorded.states]),
    )


def _node(node: Node, moves: Sequence[Move]) -> Node:
    if isinstance(node, KernelNode):
        return replace(node, relocations=_relocations(node.relocations, moves))
    if isinstance(node, MemsetNode):
        return replace(node, target=_address(node.target, moves))
    if isinstance(node, MemcpyNode):
        return replace(node, source=_address(node.source, moves), target=_address(node.target, moves))
    return node


def _relocations(rows: Sequence[Relocation], moves: Sequence[Move]) -> tuple[Relocation, ...]:
    return tuple([replace(row, target=_address(row.target, moves)) for row in rows])


def _address(address: Address, moves: Sequence[Move]) -> Address:
    return replace(address, offset=_offset(address.memory, address.offset, moves))


def _value(value: Value, moves: Sequence[Move]) -> Value:
    return replace(value, offset=_offset(MEMORIES.index(value.memory), value.offset, moves))


def _offset(memory: int, offset: int, moves: Sequence[Move]) -> int:
    begun = [move for move in moves if move.memory == memory and move.begin <= offset]
    return offset + (max(begun, key=lambda move: move.begin).by if begun else 0)
