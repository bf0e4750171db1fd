"""Combines two takes into the rows of a bundle: pairs their memory ranges, classifies the words of every graph as addresses or
other values, and lays out memory.  Pure.  A *take* is everything that one recorder process captured (take.py).  Constants outside
the program's memory become tables, which follow the weights.  All other memory that a key uses goes into its arena."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cgbundle.format.schema import MEMORIES, DonatedRange, IntKey, Value
from cgbundle.validate.module_state import Address, ModuleState, Relocation
from cgcompile.bundle.recordings import Edge, EmptyNode, Function, KernelNode, MemcpyNode, MemsetNode, Node, Recording

from ..errors import BuildError
from ..targets.cuda.bodies import Bodies
from ..targets.cuda.donations import DonatedOutput, refused
from ..targets.cuda.recorded import RecordedGraph
from ..targets.kernels.conditions import set_condition
from ..targets.memory_layout import Table
from .pairing import PairedRanges, pair_takes
from .placement import Placement, keep, place, place_tables
from .relocation import Classified, check_rows, classify, classify_graph, compare, node_name, place_of
from .rows import marks_and_graphs
from .take import (
    RawBegin,
    RawEnd,
    RawGraph,
    RawKernel,
    RawMemcpy,
    RawMemset,
    RawNextBody,
    RawNode,
    RawSetCondition,
    RawValue,
    Reading,
    Take,
)

COPY_SHAPE = ("width", "height", "depth", "source_pitch", "source_height", "target_pitch", "target_height")
"""The fields of MemcpyNode that RawMemcpy.shape holds, in its order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """`graphs`: the graphs of every key, in execution order; keys are in the order of the takes.  `tables`: placed after the
    weights."""

    graphs: dict[IntKey, tuple[RecordedGraph, ...]]
    tables: tuple[Table, ...]
    weights_end: int
    states: tuple[ModuleState, ...]
    reserved: tuple[DonatedRange, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifiedGraph:
    """The addresses of a graph, as readings in the ranges of the first take.  `blocks`: parameter blocks of kernels, by row.
    `places`: addresses of memsets, copies and conditions, by row.  `values`: addresses of the call's inputs, then outputs; None for
    an empty tensor.  `written`: indices of ranges to which memsets and copies write."""

    blocks: dict[int, Classified]
    places: dict[int, tuple[Reading, ...]]
    values: tuple[Reading | None, ...]
    written: frozenset[int]

    def used_ranges(self) -> list[int]:
        """Returns the indices of the ranges that the graph uses, in the order of first use."""
        readings = [reading for i in sorted({*self.blocks, *self.places}) for reading in self._row_readings(i)]
        return list(dict.fromkeys(reading.range for reading in (*readings, *(value for value in self.values if value))))

    def _row_readings(self, i: int) -> tuple[Reading, ...]:
        return tuple(t for _, t in self.blocks[i].relocations) if i in self.blocks else self.places[i]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifiedTakes:
    """`graphs`: in the order of the takes.  `states`: module variables as (image, symbol, contents)."""

    paired: PairedRanges
    graphs: tuple[ClassifiedGraph, ...]
    states: tuple[tuple[str, str, Classified], ...]


def assemble(
    a: Take,
    b: Take,
    weights_end: int,
    donated: Mapping[IntKey, Sequence[DonatedOutput]] = MappingProxyType({}),
    conditions: Function | None = None,
    rows_begin: int | None = None,
) -> Assembled:
    """Compares two takes and replaces every address by an offset in a memory of the bundle.

    `weights_end`: end of the program's tensors in memory `weights`.  `donated`: by key, outputs that a later call reads in place.
    `conditions`: the kernel that sets conditions, if there are branches or loops.  `rows_begin`: offset in memory `state` where the
    buffers begin whose number of rows differed between the two processes, or None.  Raises recordings-differ, address-disagrees,
    memory-refused, pointer-in-table, module-state-differs, donation-refused, state-refused."""
    takes = classify_takes(a, b)
    paired, classified, states = takes.paired, takes.graphs, takes.states
    for graph, classification in zip(a.graphs, classified, strict=True) if rows_begin is not None else ():
        check_rows(graph, classification.blocks, {i for i, span in enumerate(a.ranges) if span.kind == "state"}, rows_begin or 0)
    used = [i for graph in classified for i in graph.used_ranges()] + [
        t.range for _, _, block in states for _, t in block.relocations
    ]
    written = {i for graph in classified for i in graph.written}  # they cannot be tables, which are constant
    read = [i for i in dict.fromkeys(used) if i not in written]
    tables, offsets, end = place_tables(a, b, paired.pairing, read, weights_end)
    graphs_by_key: dict[IntKey, list[tuple[RawGraph, ClassifiedGraph]]] = {}
    for graph, classification in zip(a.graphs, classified, strict=True):
        graphs_by_key.setdefault(graph.key, []).append((graph, classification))
    donated_ranges = {key: (outputs[0].entry, _donated_ranges(a, graphs_by_key[key], outputs)) for key, outputs in donated.items()}
    layout = keep(a, donated_ranges)
    graphs = {}
    for key, key_graphs in graphs_by_key.items():
        ranges = dict.fromkeys(i for _, classification in key_graphs for i in classification.used_ranges())
        placement = place(a, ranges, offsets, key, layout.offsets.get(key, {}), layout.start)  # all graphs of a key share an arena
        graphs[key] = tuple([recorded_rows(graph, classification, placement, conditions) for graph, classification in key_graphs])
    variables = module_states(a, states, offsets)
    return Assembled(graphs=graphs, tables=tables, weights_end=end, states=variables, reserved=layout.reserved)


def classify_takes(a: Take, b: Take) -> ClassifiedTakes:
    """Pairs the ranges of two takes and classifies all graphs.  Raises recordings-differ, address-disagrees, memory-refused."""
    compare(a, b)
    paired = pair_takes(a, b)
    variables = [
        (s.image, s.symbol, classify(s.block, t.block, paired, lambda at, s=s: f"variable {s.symbol}, the word at {at}"))  # type: ignore[misc]
        for s, t in zip(a.states, b.states, strict=True)
    ]
    graphs = [_classify_all_rows(x, y, paired) for x, y in zip(a.graphs, b.graphs, strict=True)]
    return ClassifiedTakes(paired=paired, graphs=tuple(graphs), states=tuple(variables))


def _donated_ranges(take: Take, graphs: Sequence[tuple[RawGraph, ClassifiedGraph]], outputs: Sequence[DonatedOutput]) -> list[int]:
    """Returns the ranges that hold a key's donated outputs.  Raises donation-refused for an output outside the key's pool."""
    range_indices = []
    for output in outputs:
        graph, classification = graphs[output.region]
        reading = classification.values[len(graph.inputs) + output.output]
        if reading is not None and take.ranges[reading.range].kind != "pool":
            raise refused(output.entry, output.number, f"lies in memory of {take.ranges[reading.range].kind}")
        range_indices += [reading.range] if reading is not None else []
    return range_indices


def _classify_all_rows(x: RawGraph, y: RawGraph, paired: PairedRanges) -> ClassifiedGraph:
    blocks = classify_graph(x, y, paired)
    places: dict[int, tuple[Reading, ...]] = {}
    written: set[int] = set()
    for i, (m, n) in enumerate(zip(x.nodes, y.nodes, strict=True)):
        where = node_name(x, i)
        if isinstance(m, RawMemset) and isinstance(n, RawMemset):
            places[i] = (place_of(m.target, n.target, paired, where),)
        elif isinstance(m, RawMemcpy) and isinstance(n, RawMemcpy):
            places[i] = (place_of(m.source, n.source, paired, where), place_of(m.target, n.target, paired, where))
        elif isinstance(m, RawSetCondition) and isinstance(n, RawSetCondition):
            places[i] = (place_of(m.byte, n.byte, paired, where),)
        if isinstance(m, (RawMemset, RawMemcpy)):
            written.add(places[i][-1].range)
    values = tuple(
        place_of(v.place, w.place, paired, f"int_key {x.key}, tensor {i} of the call") if v.place.readings else None
        for i, (v, w) in enumerate(zip((*x.inputs, *x.outputs), (*y.inputs, *y.outputs), strict=True))
    )
    return ClassifiedGraph(blocks=blocks, places=places, values=values, written=frozenset(written))


def has_conditions(take: Take) -> bool:
    """Whether any graph has branches or loops."""
    return any(isinstance(row, RawSetCondition) for graph in take.graphs for row in graph.nodes)


def recorded_rows(graph: RawGraph, classified: ClassifiedGraph, placement: Placement, conditions: Function | None) -> RecordedGraph:
    """Returns the rows of a graph, with every address as an offset in a memory of the bundle."""
    functions: dict[Function, int] = {}
    body_builder = Bodies()
    for begin, piece, edges in marks_and_graphs(graph):
        match piece:
            case RawSetCondition(conditional=number):
                assert conditions is not None  # the caller passes it whenever `has_conditions` is true
                setter = functions.setdefault(conditions, len(functions))
                body_builder.add([set_condition(setter, placement.address(classified.places[begin][0]), number)])
            case RawBegin(conditional=number, type=type):
                body_builder.begin(number, type)
            case RawNextBody():
                body_builder.next_body()
            case RawEnd():
                body_builder.end()
            case _:
                nodes = [_node(node, begin + i, classified, placement, functions) for i, node in enumerate(piece)]
                piece_edges = [Edge(source=s, target=t, from_port=p, to_port=q, type=k) for s, t, p, q, k in edges]
                body_builder.add(nodes, piece_edges)
    rows, joined, bodies = body_builder.rows()
    recording = Recording(key=graph.key, functions=tuple(functions), nodes=rows, edges=joined, bodies=bodies)
    values = tuple(_value(v, t, placement) for v, t in zip((*graph.inputs, *graph.outputs), classified.values, strict=True))
    count = len(graph.inputs)
    return RecordedGraph(recording=recording, inputs=values[:count], outputs=values[count:], arena=placement.arena)


def _node(node: RawNode, at: int, classified: ClassifiedGraph, placement: Placement, functions: dict[Function, int]) -> Node:
    """Returns the node of row `at`.  Adds its kernel to `functions`, if it is new."""
    if isinstance(node, RawKernel):
        function = Function(image=node.image, symbol=node.symbol, params=node.params, attributes=node.function_attributes)
        return _kernel(node, functions.setdefault(function, len(functions)), classified.blocks[at], placement)
    if isinstance(node, RawMemset):
        value, element, width, height, pitch = node.shape
        target = placement.address(classified.places[at][0])
        return MemsetNode(target=target, value=value, element=element, width=width, height=height, pitch=pitch)
    if isinstance(node, RawMemcpy):
        source, target = (placement.address(t) for t in classified.places[at])
        return MemcpyNode(source=source, target=target, **dict(zip(COPY_SHAPE, node.shape, strict=True)))
    return EmptyNode()


def _kernel(node: RawKernel, function: int, block: Classified, placement: Placement) -> KernelNode:
    return KernelNode(
        function=function,
        grid=node.grid,
        threads=node.threads,
        shared=node.shared,
        block=block.data,
        relocations=tuple(Relocation(at=at, target=placement.address(target)) for at, target in block.relocations),
        undefined=block.undefined,
        attributes=node.attributes,
    )


def _value(value: RawValue, target: Reading | None, placement: Placement) -> Value:
    arena_start = Address(memory=MEMORIES.index("arena"), offset=0)  # the address of an empty tensor
    place = placement.address(target) if target else arena_start
    return Value(dtype=value.dtype, shape=value.shape, strides=value.strides, memory=MEMORIES[place.memory], offset=place.offset)


def module_states(take: Take, states: Iterable[tuple[str, str, Classified]], tables: Mapping[int, int]) -> tuple[ModuleState, ...]:
    """Returns the module variables with their pointers as relocations.  A pointer may point into weights, inputs or a table.
    `tables`: range -> offset in memory `weights`.  Raises module-state-differs."""
    return tuple(_states(take, states, tables))


def _states(take: Take, states: Iterable[tuple[str, str, Classified]], tables: Mapping[int, int]) -> Iterable[ModuleState]:
    bases = {
        i: MEMORIES.index(memory_range.kind)
        for i, memory_range in enumerate(take.ranges)
        if memory_range.kind in ("weights", "inputs")
    }
    for image, symbol, block in states:
        if block.undefined:
            at = block.undefined[0][0]
            raise BuildError(
                "module-state-differs", f"variable {symbol} of image {image[:12]} differs between two processes at byte {at}"
            )
        relocations = []
        for at, target in block.relocations:
            if target.range not in tables and target.range not in bases:
                raise BuildError(
                    "module-state-differs",
                    f"variable {symbol} of image {image[:12]} points at memory whose contents differ between processes",
                )
            address = Address(memory=bases.get(target.range, 0), offset=tables.get(target.range, 0) + target.offset)
            relocations.append(Relocation(at=at, target=address))
        yield ModuleState(image=image, symbol=symbol, contents=block.data, relocations=tuple(relocations))
