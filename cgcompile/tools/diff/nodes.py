"""Describes how two nodes at the same position of two recordings differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from cgbundle.format.schema import MEMORIES
from cgbundle.validate.module_state import Address
from cgcompile.bundle.recordings import ConditionalNode, EmptyNode, Function, KernelNode, MemcpyNode, MemsetNode, Node, Recording

KINDS: dict[type, str] = {
    KernelNode: "kernel",
    MemsetNode: "memset",
    MemcpyNode: "memcpy",
    EmptyNode: "empty",
    ConditionalNode: "conditional",
}

IMAGE = "image"
"""The name of the difference of two nodes whose kernels have the same symbol, but are from different images."""

DIGITS = 12
"""Digits of an image's SHA-256, as in `inspect --kernels`."""

WORD = 8
"""Maximum bytes of a parameter that is shown as one number or address; a larger one is a struct."""

SMALL = 1 << 24
"""Numbers of this size or more are shown in hexadecimal, because most of them are floats or addresses."""


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
    left, right = a.nodes[number], b.nodes[number]
    if isinstance(left, KernelNode) and isinstance(right, KernelNode):
        kernel_a, kernel_b = a.functions[left.function], b.functions[right.function]
        if kernel_a.symbol != kernel_b.symbol:
            return [("kernel", f"{kernel_a.symbol} -> {kernel_b.symbol}")]
        equal = left == right and kernel_a == kernel_b
        return [] if equal else [*_launch(kernel_a, left, kernel_b, right), *_parameters(kernel_a, left, kernel_b, right)]
    if type(left) is not type(right):
        return [("kind", f"{title(a, number)} -> {title(b, number)}")]
    pairs = [(field.name, getattr(left, field.name), getattr(right, field.name)) for field in fields(left)]
    return [(name, f"{_text(before)} -> {_text(after)}") for name, before, after in pairs if before != after]


def _text(value: object) -> str:
    if isinstance(value, Address):
        return place(value)
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _launch(kernel_a: Function, left: KernelNode, kernel_b: Function, right: KernelNode) -> Iterator[tuple[str, str]]:
    pairs = (
        (IMAGE, kernel_a.image[:DIGITS], kernel_b.image[:DIGITS]),
        ("grid", left.grid, right.grid),
        ("block", left.threads, right.threads),
        ("shared memory", left.shared, right.shared),
        ("launch attributes", _attributes(left.attributes), _attributes(right.attributes)),
        ("attributes of the kernel", _attributes(kernel_a.attributes), _attributes(kernel_b.attributes)),
    )
    for name, before, after in pairs:
        if before != after:
            yield name, f"{_text(before)} -> {_text(after)}"


def _attributes(attributes: Iterable[tuple[int, object]]) -> str:
    return ", ".join([f"{number}={_text(value)}" for number, value in sorted(attributes, key=lambda pair: pair[0])]) or "none"


def _parameters(kernel_a: Function, left: KernelNode, kernel_b: Function, right: KernelNode) -> Iterator[tuple[str, str]]:
    if kernel_a.params != kernel_b.params or len(left.block) != len(right.block):
        counts = [f"{len(function.params)} in {len(node.block)} bytes" for function, node in ((kernel_a, left), (kernel_b, right))]
        yield "layout of the parameters", " -> ".join(counts)
        return
    unread = _unread(left) | _unread(right) if kernel_a.image == kernel_b.image else _unread(left) & _unread(right)
    labels = [{relocation.at: place(relocation.target) for relocation in node.relocations} for node in (left, right)]
    for targets, node in zip(labels, (left, right), strict=True):
        targets.update({handle.at: f"condition {handle.conditional}" for handle in node.handles})
    changed = {at for at in {**labels[0], **labels[1]} if labels[0].get(at) != labels[1].get(at)}
    changed |= {at for at in range(len(left.block)) if left.block[at] != right.block[at] and at not in unread}
    for number, (offset, size) in enumerate(kernel_a.params):
        if inside := {at for at in changed if offset <= at < offset + size}:
            changed -= inside
            first = min(inside)
            at, width, name = offset, size, f"parameter {number}"
            if size > WORD:
                at, width, name = first, min(4, offset + size - first), f"{name} at byte {first - offset}"
            texts = [
                targets.get(at) or _number(node.block[at : at + width]) for targets, node in zip(labels, (left, right), strict=True)
            ]
            yield name, " -> ".join(texts)
    if changed:
        yield "bytes between parameters", f"first at {min(changed)}"


def _unread(node: KernelNode) -> set[int]:
    """Returns the offsets of bytes in the parameter block that no kernel reads."""
    return {at for offset, size in node.undefined for at in range(offset, offset + size)}


def _number(data: bytes) -> str:
    value = int.from_bytes(data, "little", signed=True)
    return str(value) if abs(value) < SMALL else f"0x{data[::-1].hex()}"
