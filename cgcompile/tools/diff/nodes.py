"""Describes how two nodes at the same position of two recordings differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from cgbundle.format.schema import MEMORIES
from cgbundle.tables.module_state import Address
from cgcompile.bundle.recordings import ConditionalNode, EmptyNode, Function, KernelNode, MemcpyNode, MemsetNode, Node, Recording

KINDS: dict[type, str] = {
    KernelNode: "kernel",
    MemsetNode: "memset",
    MemcpyNode: "memcpy",
    EmptyNode: "empty",
    ConditionalNode: "conditional",
}

IMAGE = "image"
"""The name of the difference if two nodes launch the same symbol from two images."""

DIGITS = 12
"""Digits of an image's SHA-256, as in `inspect --kernels`."""

WORD = 8
"""Maximum bytes of a parameter that is shown as one number or address; a larger one is a struct."""

SMALL = 1 << 24
"""Larger numbers are shown in hexadecimal: they are more often floats and addresses than counts."""


def kind(node: Node) -> str:
    """Returns kernel, memset, memcpy, empty or conditional."""
    return KINDS[type(node)]


def title(recording: Recording, number: int) -> str:
    """Describes a node: `kernel add_kernel`, `memset`."""
    node = recording.nodes[number]
    return f"kernel {recording.functions[node.function].symbol}" if isinstance(node, KernelNode) else kind(node)


def place(address: Address) -> str:
    """Formats an address: `arena+512`."""
    return f"{MEMORIES[address.memory]}+{address.offset}"


def changes(a: Recording, b: Recording, number: int) -> list[tuple[str, str]]:
    """Describes the differences of node `number`: ("grid", "4x1x1 -> 8x1x1"), ("parameter 2", "arena+0 -> arena+512").

    Bytes of parameters that no kernel reads are ignored.
    """
    node, other_node = a.nodes[number], b.nodes[number]
    if isinstance(node, KernelNode) and isinstance(other_node, KernelNode):
        function, other_function = a.functions[node.function], b.functions[other_node.function]
        if function.symbol != other_function.symbol:
            return [("kernel", f"{function.symbol} -> {other_function.symbol}")]
        equal = node == other_node and function == other_function
        return (
            []
            if equal
            else [*_launch(function, node, other_function, other_node), *_parameters(function, node, other_function, other_node)]
        )
    if type(node) is not type(other_node):
        return [("kind", f"{title(a, number)} -> {title(b, number)}")]
    pairs = [(field.name, getattr(node, field.name), getattr(other_node, field.name)) for field in fields(node)]
    return [(name, f"{_text(before)} -> {_text(after)}") for name, before, after in pairs if before != after]


def _text(value: object) -> str:
    if isinstance(value, Address):
        return place(value)
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _launch(function: Function, node: KernelNode, other_function: Function, other_node: KernelNode) -> Iterator[tuple[str, str]]:
    pairs = (
        (IMAGE, function.image[:DIGITS], other_function.image[:DIGITS]),
        ("grid", node.grid, other_node.grid),
        ("block", node.threads, other_node.threads),
        ("shared memory", node.shared, other_node.shared),
        ("launch attributes", _attributes(node.attributes), _attributes(other_node.attributes)),
        ("attributes of the kernel", _attributes(function.attributes), _attributes(other_function.attributes)),
    )
    for name, before, after in pairs:
        if before != after:
            yield name, f"{_text(before)} -> {_text(after)}"


def _attributes(attributes: Iterable[tuple[int, object]]) -> str:
    return ", ".join([f"{number}={_text(value)}" for number, value in sorted(attributes, key=lambda pair: pair[0])]) or "none"


def _parameters(mine: Function, node_a: KernelNode, theirs: Function, node_b: KernelNode) -> Iterator[tuple[str, str]]:
    if mine.params != theirs.params or len(node_a.block) != len(node_b.block):
        counts = [f"{len(function_a.params)} in {len(node.block)} bytes" for function_a, node in ((mine, node_a), (theirs, node_b))]
        yield "layout of the parameters", " -> ".join(counts)
        return
    unread = _unread(node_a) | _unread(node_b) if mine.image == theirs.image else _unread(node_a) & _unread(node_b)
    targets_by_side = [{relocation.at: place(relocation.target) for relocation in node.relocations} for node in (node_a, node_b)]
    for targets, node in zip(targets_by_side, (node_a, node_b), strict=True):
        targets.update({handle.at: f"condition {handle.conditional}" for handle in node.handles})
    changed_bytes = {
        at for at in {**targets_by_side[0], **targets_by_side[1]} if targets_by_side[0].get(at) != targets_by_side[1].get(at)
    }
    changed_bytes |= {at for at in range(len(node_a.block)) if node_a.block[at] != node_b.block[at] and at not in unread}
    for number, (offset, size) in enumerate(mine.params):
        if inside := {at for at in changed_bytes if offset <= at < offset + size}:
            changed_bytes -= inside
            first = min(inside)
            at, width, name = offset, size, f"parameter {number}"
            if size > WORD:
                at, width, name = first, min(4, offset + size - first), f"{name} at byte {first - offset}"
            texts = [
                targets.get(at) or _number(node.block[at : at + width])
                for targets, node in zip(targets_by_side, (node_a, node_b), strict=True)
            ]
            yield name, " -> ".join(texts)
    if changed_bytes:
        yield "bytes between parameters", f"first at {min(changed_bytes)}"


def _unread(node: KernelNode) -> set[int]:
    """Returns the byte offsets of parameters that no kernel reads."""
    return {at for offset, size in node.undefined for at in range(offset, offset + size)}


def _number(data: bytes) -> str:
    value = int.from_bytes(data, "little", signed=True)
    return str(value) if abs(value) < SMALL else f"0x{data[::-1].hex()}"
