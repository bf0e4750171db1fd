"""Combines two recordings of an engine into graphs in which every address is an offset in a memory of the bundle.  Pure.

The rules are those of `capture/assemble.py`, with two exceptions.  Graphs may use only named tensors and their private pools.
Other memory is refused: an engine may write to it between replays.  Only memory that module variables point to becomes a table.
All pools together become one arena, which keeps its contents from graph to graph, as in the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cgbundle.format.schema import MEMORIES, EngineSpan, EngineTensor
from cgbundle.validate.module_state import ModuleState

from ...bundle.recordings import Recording
from ...errors import BuildError, ModelError
from ...targets.memory_layout import Table
from ..assemble import ClassifiedTakes, classify_takes, module_states, recorded_rows
from ..pairing import PairedRanges, meaning
from ..placement import Placement, place, place_tables
from ..relocation import graph_name, node_name, spot
from ..take import RawGraph, RawKernel, Reading, Take
from .engine_take import EngineTake
from .layout import alignment

OUTSIDE = {"torch": "torch's memory", "device": "an allocation that torch did not make"}
"""Kinds of ranges that are neither named tensors nor private pools -> their names in messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssembledEngine:
    """The contents of an engine's bundle.  `recordings`: one per graph.  `tensors`, `spans`: only those that a graph uses.
    `tables`: in memory `weights`, which ends at `weights_end`.  `arena`: its size in bytes."""

    recordings: tuple[Recording, ...]
    tensors: tuple[EngineTensor, ...]
    spans: tuple[EngineSpan, ...]
    states: tuple[ModuleState, ...]
    tables: tuple[Table, ...]
    weights_end: int
    arena: int


def assemble_engine(one: EngineTake, other: EngineTake, *, own_memory: bool) -> AssembledEngine:
    """Compares and combines the recordings of two processes.  `own_memory`: also refuse pointers stored in the private pools.  Set
    it if no fresh process replays the graphs: only a replay shows that the graphs write these words before they read them.

    Raises engine-differs, addresses-equal, memory-unnamed, pointer-in-tensor, and what `classify_takes` does.
    """
    check_alike(one, other)
    a, b = one.take, other.take
    takes = classify_takes(a, b)
    pointed = {target.range for _, _, block in takes.states for _, target in block.relocations}
    for number in sorted(pointed):
        if a.ranges[number].kind == "torch":
            raise ModelError("memory-unnamed", f"a variable of a kernel's image points at {_describe(a, number)}")
    tables, offsets, end = place_tables(a, b, takes.paired.pairing, sorted(pointed), 0)
    for reason in _unnamed(a, takes, set(offsets)):
        raise ModelError("memory-unnamed", reason)
    used = list(dict.fromkeys(i for classified in takes.graphs for i in classified.used_ranges()))
    _check_apart(a, b, takes.paired, used)
    _check_pointers(one, other, takes.paired, used, own_memory=own_memory)
    placement = place(a, used, offsets, ())
    recordings = [
        recorded_rows(graph, classified, placement, None).recording
        for graph, classified in zip(a.graphs, takes.graphs, strict=True)
    ]
    spans = [number for number, memory_range in enumerate(a.ranges) if memory_range.kind == "inputs" and number in used]
    return AssembledEngine(
        recordings=tuple(recordings),
        tensors=(*_named(one, spans), *_pooled(one, takes, placement)),
        spans=tuple([_span(a, b, number) for number in sorted(spans, key=lambda number: a.ranges[number].offset)]),
        states=module_states(a, takes.states, offsets),
        tables=tables,
        weights_end=end,
        arena=placement.arena,
    )


def check_alike(one: EngineTake, other: EngineTake) -> None:
    """Raises engine-differs unless both processes have equal versions, GPUs, drivers, keys, and layouts of tensors."""
    if one.process == other.process:
        raise BuildError("engine-differs", "both recordings are of this process: the second must come from another process")
    for property_name, mine, theirs in (
        ("versions", one.versions, other.versions),
        ("architecture", one.take.arch, other.take.arch),
        ("driver", one.take.driver, other.take.driver),
        ("keys", one.keys, other.keys),
        ("tensors in the graphs' own memory", sorted(one.pooled), sorted(other.pooled)),
    ):
        if mine != theirs:
            raise BuildError("engine-differs", f"the first recording has other {property_name}: {_first(mine, theirs)}")
    for was, now in zip(one.tensors, other.tensors, strict=False):
        if was != now:
            raise BuildError("engine-differs", f"tensor {was.name!r} was {was}, and is {now}")
    if len(one.tensors) != len(other.tensors):
        raise BuildError("engine-differs", f"the first recording has {len(one.tensors)} tensors, this one {len(other.tensors)}")


def _first(mine: object, theirs: object) -> str:
    if isinstance(mine, Sequence) and isinstance(theirs, Sequence) and not isinstance(mine, str):
        for x, y in zip(mine, theirs, strict=False):
            if x != y:
                return f"{x} and {y}"
        return f"{len(mine)} and {len(theirs)} of them"
    return f"{mine} and {theirs}"


def _unnamed(take: Take, takes: ClassifiedTakes, tables: set[int]) -> Iterator[str]:
    """Yields a text for every address in a graph that is neither in a named tensor nor in a private pool."""
    for graph, classified in zip(take.graphs, takes.graphs, strict=True):
        for i, node in enumerate(graph.nodes):
            name = node_name(graph, i)
            if isinstance(node, RawKernel):
                places = [(spot(name, node, at), target) for at, target in classified.blocks[i].relocations]
            else:
                places = [(name, target) for target in classified.places.get(i, ())]
            for where, target in places:
                if take.ranges[target.range].kind in OUTSIDE and target.range not in tables:
                    yield f"{where} points at {_describe(take, target.range)}, {target.offset} bytes into it"


def _describe(take: Take, number: int) -> str:
    memory_range = take.ranges[number]
    return f"{memory_range.size:,} bytes of {OUTSIDE.get(memory_range.kind, memory_range.kind)} that no tensor names"


def _check_apart(a: Take, b: Take, paired: PairedRanges, used: Sequence[int]) -> None:
    """Raises addresses-equal if a used range starts at the same address in both processes: then equal bytes may be addresses."""
    for number in used:
        if number in paired.pairing and a.ranges[number].start == b.ranges[paired.pairing[number]].start:
            memory_range = a.ranges[number]
            raise BuildError(
                "addresses-equal", f"both processes have {memory_range.size:,} bytes of the engine's at {memory_range.start:#x}"
            )


def _check_pointers(one: EngineTake, other: EngineTake, paired: PairedRanges, used: Sequence[int], *, own_memory: bool) -> None:
    """Raises pointer-in-tensor for a word in used memory that is an address in both processes.  A kernel may dereference it, but it
    is not an address in the process that replays the graphs."""
    theirs = {(pointer.range, pointer.word.at): pointer.word for pointer in other.pointers}
    for pointer in one.pointers:
        word = theirs.get((paired.pairing.get(pointer.range, -1), pointer.word.at))
        memory_range = one.take.ranges[pointer.range]
        if word is None or pointer.range not in used or (memory_range.kind == "pool" and not own_memory):
            continue
        names = [row.name for row in one.tensors if row.span == pointer.range] if memory_range.kind == "inputs" else []
        place = f"tensor {names[0]!r}" if names else "the graphs' own memory"
        target = meaning(pointer.word, word, paired)
        to = f", of {_target(one, target)}" if target is not None else ""
        text = f"{place} holds an address at byte {pointer.word.at}{to}: `attach` would not replace it"
        raise ModelError("pointer-in-tensor", text)


def _target(take: EngineTake, target: Reading) -> str:
    names = [row.name for row in take.tensors if row.span == target.range]
    return f"tensor {names[0]!r}" if names and take.take.ranges[target.range].kind == "inputs" else "the graphs' own memory"


def _named(take: EngineTake, spans: Sequence[int]) -> list[EngineTensor]:
    return [
        EngineTensor(
            name=row.name, dtype=row.dtype, shape=row.shape, strides=row.strides, memory="inputs",
            offset=take.take.ranges[row.span].offset + row.offset,
        )
        for row in take.tensors
        if row.span in spans
    ]  # fmt: skip


def _pooled(take: EngineTake, takes: ClassifiedTakes, placement: Placement) -> list[EngineTensor]:
    """Returns the rows of the tensors in private pools, with offsets in the arena.  Raises memory-unnamed."""
    first: RawGraph = take.take.graphs[0]
    rows = []
    for name, value, target in zip(take.pooled, first.outputs, takes.graphs[0].values, strict=True):
        if target is None or take.take.ranges[target.range].kind != "pool":
            raise ModelError("memory-unnamed", f"{graph_name(first)}: tensor {name!r} is not inside the graphs' private pools")
        address = placement.address(target)
        assert MEMORIES[address.memory] == "arena"
        rows.append(
            EngineTensor(
                name=name, dtype=value.dtype, shape=value.shape, strides=value.strides, memory="arena", offset=address.offset
            )
        )
    return rows


def _span(a: Take, b: Take, number: int) -> EngineSpan:
    memory_range = a.ranges[number]
    return EngineSpan(
        offset=memory_range.offset, bytes=memory_range.size, alignment=alignment(memory_range.start, b.ranges[number].start)
    )
