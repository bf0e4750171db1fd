"""Compares one graph's recordings from two processes, and classifies every 8-byte aligned word of its parameter blocks.  Pure.

The classes are (see README.md in this folder):

* *relocation*: a live address of the same place in both recordings.  The bundle holds (memory, offset) instead of the bytes.
* *constant*: bytes that are equal in both.
* *undefined*: bytes that differ but are no address in both: padding, unused array slots, stale stack contents.  The bundle
  holds zeros and lists them byte by byte, since a word may hold four bytes of data and four bytes of padding.  The
  verification fills them with poison, which shows that no kernel reads them.  A word that is an address in one recording
  only is undefined.  So are two kinds of words that look like addresses of weights, inputs or state (see `_is_stale`).

Any other word that is an address in both recordings, but of different places, is refused.  So is a word that points into
pinned host memory in both.
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
    """A block without its addresses.  `relocations`: (offset of 8 bytes, place that they point to).  `undefined`: (offset, size).
    `data` has zeros at both."""

    data: bytes
    relocations: tuple[tuple[int, Reading], ...]
    undefined: tuple[tuple[int, int], ...]


def compare(a: Take, b: Take) -> None:
    """Checks that two takes hold the same graphs, except for addresses and parameter bytes.  Raises recordings-differ."""
    for difference in _differences(a, b):
        raise BuildError("recordings-differ", difference)


def _differences(a: Take, b: Take) -> Iterator[str]:
    if [(g.key, g.region) for g in a.graphs] != [(g.key, g.region) for g in b.graphs]:
        yield f"the recordings hold the keys {[g.key for g in a.graphs]} and {[g.key for g in b.graphs]}"
    for x, y in zip(a.graphs, b.graphs, strict=True):
        if len(x.nodes) != len(y.nodes):
            yield f"{graph_name(x)}: {len(x.nodes)} nodes in one recording, {len(y.nodes)} in the other"
        for i, (m, n) in enumerate(zip(x.nodes, y.nodes, strict=True)):
            for trait, mine, theirs in _traits(m, n):
                if mine != theirs:
                    yield f"{node_name(x, i)}: {trait} is {mine} in one recording and {theirs} in the other"
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
    """Classifies one block.  `where` names the word at an offset in messages.  Raises address-disagrees, memory-refused."""
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
    """Whether two words of different places are stale bytes, not addresses.  Weights, inputs and state have the same offsets in
    both processes.  So a word that looks like such an address in one process only is left over from another call.  If it looks like
    one in both and its lower four bytes are equal, it is a 4-byte number below four stale bytes."""
    in_buffers = stays(word, paired.ranges[0]), stays(other, paired.ranges[1])
    at = slice(word.at, word.at + 4)
    return any(in_buffers) and (mine.data[at] == theirs.data[at] or in_buffers[0] != in_buffers[1])


def classify_graph(x: RawGraph, y: RawGraph, paired: PairedRanges) -> dict[int, Classified]:
    """Classifies the parameter blocks of a graph's kernels, by node position.  Raises what `classify` does."""
    return {
        i: classify(m.block, n.block, paired, partial(spot, node_name(x, i), m))
        for i, (m, n) in enumerate(zip(x.nodes, y.nodes, strict=True))
        if isinstance(m, RawKernel) and isinstance(n, RawKernel)
    }


def check_rows(graph: RawGraph, blocks: Mapping[int, Classified], state: Collection[int], begin: int) -> None:
    """Raises state-refused if a kernel has a pointer to state with a variable number of rows, and a parameter that differs: the
    parameter may depend on the number of rows.  `state`: indices of state ranges, in which rows vary from offset `begin` on."""
    for i, block in blocks.items():
        kernel = graph.nodes[i]
        assert isinstance(kernel, RawKernel)
        if any(target.range in state and target.offset >= begin for _, target in block.relocations):
            for number, (offset, size) in enumerate(kernel.params):
                if any(at < offset + size and offset < at + length for at, length in block.undefined):
                    text = f"parameter {number} may depend on the number of rows of state, which is chosen at load"
                    raise ModelError("state-refused", f"{node_name(graph, i)}: {text}")


def place_of(mine: Word, theirs: Word, paired: PairedRanges, where: str) -> Reading:
    """Returns the place that the address of a memset, copy, condition, input or output means.  Raises address-disagrees."""
    target = meaning(mine, theirs, paired)
    if target is None:
        raise BuildError(
            "address-disagrees",
            f"{where} is an address in both recordings, but not of the same place: {_both(mine, theirs, paired)}",
        )
    return target


def node_name(graph: RawGraph, i: int) -> str:
    """Returns a node's name for messages: "int_key (8,), node 17 (symbol)"."""
    node = graph.nodes[i]
    kind = {RawMemset: "memset", RawMemcpy: "memcpy", RawEmpty: "empty", RawSetCondition: "condition"}.get(type(node), "body")
    region = f"graph {graph.region + 1}, " if graph.region else ""
    line = f", {node.line}" if isinstance(node, RawKernel) and node.line else ""
    return f"{graph_name(graph)}, {region}node {i} ({node.symbol if isinstance(node, RawKernel) else kind}{line})"


def graph_name(graph: RawGraph) -> str:
    """Returns a graph's name for messages: "int_key (8,)"."""
    return graph.name or f"int_key {graph.key}"


def address_at(block: Block, at: int) -> int:
    """Reads the 8-byte little-endian number at offset `at`."""
    return int.from_bytes(block.data[at : at + 8], "little")


def _traits(m: RawRow, n: RawRow) -> Iterator[tuple[str, object, object]]:
    """Yields the properties that must be equal in two nodes: (name, value in the first, value in the second)."""
    yield "the kind", type(m).__name__, type(n).__name__
    if isinstance(m, RawKernel) and isinstance(n, RawKernel):
        for trait in ("symbol", "image", "grid", "threads", "shared", "params", "function_attributes", "attributes"):
            yield trait, getattr(m, trait), getattr(n, trait)
        yield "the parameters' size", len(m.block.data), len(n.block.data)
    elif isinstance(m, RawMemset | RawMemcpy) and isinstance(n, RawMemset | RawMemcpy):
        yield "the shape", m.shape, n.shape
    elif isinstance(m, RawSetCondition) and isinstance(n, RawSetCondition):
        yield "the branch or loop", m.conditional, n.conditional
    elif isinstance(m, RawBegin | RawNextBody | RawEnd):
        yield "the branch or loop", m, n


def spot(node: str, kernel: RawKernel, at: int) -> str:
    """Returns the name for messages of the parameter word at offset `at`."""
    for i, (offset, size) in enumerate(kernel.params):
        if offset <= at < offset + size:
            return f"{node}, parameter {i}, the word at {at - offset} of {size} bytes"
    return f"{node}, the word at {at} of the parameters"


def _both(mine: Word, theirs: Word, paired: PairedRanges) -> str:
    """Describes the possible places of both words: kind and size of the range, and offset in it."""
    texts = []
    for word, ranges in ((mine, paired.ranges[0]), (theirs, paired.ranges[1])):
        places = [(ranges[target.range], target) for target in word.readings]
        texts.append(
            " or ".join(
                f"{memory_range.kind} of {memory_range.size:,} bytes, {target.offset:,} into it" for memory_range, target in places
            )
        )
    return f"{texts[0]}; in the other process {texts[1]}"


def _runs(positions: list[int]) -> Iterator[tuple[int, int]]:
    """Yields (start, length) for every run of consecutive numbers in sorted `positions`."""
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
