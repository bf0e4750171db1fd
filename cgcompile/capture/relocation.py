"""Two recordings of one graph, made in two processes, become one with every address named.  Pure: no GPU, no torch.

Every 8-byte aligned word of a parameter block is one of (README.md here):

* *relocation*: a live address in both recordings, of the same place.  It leaves the block and becomes (memory, offset).
* *constant*: the bytes that are equal in both.
* *undefined*: bytes that differ and are no address in both: padding, unused slots of arrays, stale stack.  They are zeroed
  and listed, to be poisoned in the verification, which shows that no kernel reads them.  This is decided byte by byte,
  since a word may hold four bytes of data beside four bytes of padding.  A word that is an address in one recording only
  is of this kind.  So is one that one process alone reads as a place of weights, inputs or state: a live address of these
  is one in both.  So is one with equal lower halves that both read so, at different places.

Refused: any other word that is an address in both recordings but of different places, and one that points into pinned host
memory in both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..errors import BuildError, ModelError
from .pairing import PairedRanges, meaning, stays
from .take import (
    Block,
    RawBegin,
    RawEmpty,
    RawEnd,
    RawGraph,
    RawKernel,
    RawMemcpy,
    RawMemset,
    RawNextBody,
    RawRow,
    RawSetCondition,
    Reading,
    Take,
    Word,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Classified:
    """A block without its addresses: `data` has zeros at `relocations`, (offset, where 8 bytes point), and at `undefined`, (offset,
    size)."""

    data: bytes
    relocations: tuple[tuple[int, Reading], ...]
    undefined: tuple[tuple[int, int], ...]


def compare(a: Take, b: Take) -> None:
    """Check that two takes hold the same graphs but for addresses and bytes.  Raises recordings-differ."""
    for difference in _differences(a, b):
        raise BuildError("recordings-differ", difference)


def _differences(a: Take, b: Take) -> Iterator[str]:
    if [(g.key, g.region) for g in a.graphs] != [(g.key, g.region) for g in b.graphs]:
        yield f"the recordings hold the keys {[g.key for g in a.graphs]} and {[g.key for g in b.graphs]}"
    for x, y in zip(a.graphs, b.graphs, strict=True):
        if len(x.nodes) != len(y.nodes):
            yield f"{graph_name(x)}: {len(x.nodes)} nodes in one recording, {len(y.nodes)} in the other"
        for i, (m, n) in enumerate(zip(x.nodes, y.nodes, strict=True)):
            for what, mine, theirs in _traits(m, n):
                if mine != theirs:
                    yield f"{node_name(x, i)}: {what} is {mine} in one recording and {theirs} in the other"
        if x.edges != y.edges:
            yield f"{graph_name(x)}: the edges differ, first {_first_difference(x.edges, y.edges)}"
        for side, tensors, others in (("input", x.inputs, y.inputs), ("output", x.outputs, y.outputs)):
            shapes = [[(v.dtype, v.shape, v.strides) for v in values] for values in (tensors, others)]
            if shapes[0] != shapes[1]:
                yield f"{graph_name(x)}: the {side}s differ, first {_first_difference(*shapes)}"
    states = [[(s.image[:12], s.symbol, len(s.block.data)) for s in take.states] for take in (a, b)]
    if states[0] != states[1]:
        yield f"other module variables had changed, first {_first_difference(*states)}"


def classify(mine: Block, theirs: Block, paired: PairedRanges, where: Callable[[int], str]) -> Classified:
    """Classify one block.  `where` names the word at an offset in messages.  Raises address-disagrees, memory-refused."""
    data = bytearray(mine.data)
    relocations: list[tuple[int, Reading]] = []
    others = {word.at: word for word in theirs.words}
    for word in mine.words:
        other = others.get(word.at)
        if other is None:
            continue
        if word.readings[0].range in paired.hosts[0] and other.readings[0].range in paired.hosts[1]:
            raise ModelError(
                "memory-refused", f"{where(word.at)} is an address of pinned host memory ({address_at(mine, word.at):#x})"
            )
        target = meaning(word, other, paired)
        if target is None and _is_stale(mine, theirs, word, other, paired):
            continue
        if target is None:
            raise BuildError(
                "address-disagrees",
                f"{where(word.at)} is an address in both recordings, but not of the same place: {_both(word, other, paired)}",
            )
        relocations.append((word.at, target))
        data[word.at : word.at + 8] = bytes(8)
    addresses = {at + i for at, _ in relocations for i in range(8)}
    differing = [i for i, (x, y) in enumerate(zip(mine.data, theirs.data, strict=True)) if x != y and i not in addresses]
    for i in differing:
        data[i] = 0
    return Classified(data=bytes(data), relocations=tuple(relocations), undefined=tuple(_runs(differing)))


def _is_stale(mine: Block, theirs: Block, word: Word, other: Word, paired: PairedRanges) -> bool:
    """Whether two words, which are no address of the same place, are no address at all.  The build places weights, inputs and state
    itself, at the same offsets in every process.  So an address of them is one in both, or left over from another call.  Read so in
    both at different places, it is a number of four bytes with left-over ones above it, if the number is the same."""
    kept = stays(word, paired.ranges[0]), stays(other, paired.ranges[1])
    at = slice(word.at, word.at + 4)
    return any(kept) and (mine.data[at] == theirs.data[at] or kept[0] != kept[1])


def classify_graph(x: RawGraph, y: RawGraph, paired: PairedRanges) -> dict[int, Classified]:
    """Classify the parameter blocks of a graph's kernels, by position of the node.  Raises as `classify` does."""
    return {
        i: classify(m.block, n.block, paired, partial(spot, node_name(x, i), m))
        for i, (m, n) in enumerate(zip(x.nodes, y.nodes, strict=True))
        if isinstance(m, RawKernel) and isinstance(n, RawKernel)
    }


def check_rows(graph: RawGraph, blocks: Mapping[int, Classified], state: Collection[int], begin: int) -> None:
    """Raises state-refused where a kernel takes the address of state whose number of rows is another one in the other recording,
    from byte `begin` of the ranges `state` on, and a parameter that differs: the kernel would compute with that number."""
    for i, block in blocks.items():
        kernel = graph.nodes[i]
        assert isinstance(kernel, RawKernel)
        if any(target.range in state and target.offset >= begin for _, target in block.relocations):
            for number, (offset, size) in enumerate(kernel.params):
                if any(at < offset + size and offset < at + length for at, length in block.undefined):
                    text = f"{node_name(graph, i)}: parameter {number} follows the number of rows of state, which a load chooses"
                    raise ModelError("state-refused", text)


def place_of(mine: Word, theirs: Word, paired: PairedRanges, where: str) -> Reading:
    """The place that an address outside a block means: of a memset, a copy, an input or output.  Raises address-disagrees."""
    target = meaning(mine, theirs, paired)
    if target is None:
        raise BuildError(
            "address-disagrees",
            f"{where} is an address in both recordings, but not of the same place: {_both(mine, theirs, paired)}",
        )
    return target


def node_name(graph: RawGraph, i: int) -> str:
    """A node in messages: "int_key (8,), node 17 (symbol)"."""
    node = graph.nodes[i]
    kind = {RawMemset: "memset", RawMemcpy: "memcpy", RawEmpty: "empty", RawSetCondition: "condition"}.get(type(node), "body")
    region = f"graph {graph.region + 1}, " if graph.region else ""
    line = f", {node.line}" if isinstance(node, RawKernel) and node.line else ""
    return f"{graph_name(graph)}, {region}node {i} ({node.symbol if isinstance(node, RawKernel) else kind}{line})"


def graph_name(graph: RawGraph) -> str:
    """A graph in messages: "int_key (8,)"."""
    return graph.name or f"int_key {graph.key}"


def address_at(block: Block, at: int) -> int:
    """The 8-byte little-endian number at `at`."""
    return int.from_bytes(block.data[at : at + 8], "little")


def _traits(m: RawRow, n: RawRow) -> Iterator[tuple[str, object, object]]:
    """What two nodes of two recordings must have in common, as (what, mine, theirs)."""
    yield "the kind", type(m).__name__, type(n).__name__
    if isinstance(m, RawKernel) and isinstance(n, RawKernel):
        for what in ("symbol", "image", "grid", "threads", "shared", "params", "function_attributes", "attributes"):
            yield what, getattr(m, what), getattr(n, what)
        yield "the parameters' size", len(m.block.data), len(n.block.data)
    elif isinstance(m, RawMemset | RawMemcpy) and isinstance(n, RawMemset | RawMemcpy):
        yield "the shape", m.shape, n.shape
    elif isinstance(m, RawSetCondition) and isinstance(n, RawSetCondition):
        yield "the branch or loop", m.conditional, n.conditional
    elif isinstance(m, RawBegin | RawNextBody | RawEnd):
        yield "the branch or loop", m, n


def spot(node: str, kernel: RawKernel, at: int) -> str:
    """A word of a kernel's parameters in messages."""
    for i, (offset, size) in enumerate(kernel.params):
        if offset <= at < offset + size:
            return f"{node}, parameter {i}, the word at {at - offset} of {size} bytes"
    return f"{node}, the word at {at} of the parameters"


def _both(mine: Word, theirs: Word, paired: PairedRanges) -> str:
    """What the two processes read there: kind and bytes of the range, and how far into it."""
    said = []
    for word, ranges in ((mine, paired.ranges[0]), (theirs, paired.ranges[1])):
        places = [(ranges[target.range], target) for target in word.readings]
        said.append(" or ".join(f"{piece.kind} of {piece.size:,} bytes, {target.offset:,} into it" for piece, target in places))
    return f"{said[0]}; in the other process {said[1]}"


def _runs(positions: list[int]) -> Iterator[tuple[int, int]]:
    """Sorted positions as (start, length) of consecutive runs."""
    start = 0
    for i in range(1, len(positions) + 1):
        if i == len(positions) or positions[i] != positions[i - 1] + 1:
            yield positions[start], i - start
            start = i


def _first_difference(mine: Sequence[object], theirs: Sequence[object]) -> str:
    for x, y in zip(mine, theirs, strict=False):
        if x != y:
            return f"{x} and {y}"
    return f"{len(mine)} and {len(theirs)} of them"
