"""Two nodes at one place of two recordings: what of them differs, as text."""

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
"""What differs between two nodes that launch one symbol from two images."""

DIGITS = 12
"""Of an image's SHA-256, as `inspect --kernels` shows it."""

WORD = 8
"""Bytes up to which a parameter is one number or address; a larger one is a struct."""

SMALL = 1 << 24
"""Numbers from here on are shown in hexadecimal: floats and addresses more often than counts."""


def kind(node: Node) -> str:
    """kernel, memset, memcpy, empty or conditional."""
    return KINDS[type(node)]


def title(recording: Recording, number: int) -> str:
    """`kernel add_kernel`, `memset`."""
    node = recording.nodes[number]
    return f"kernel {recording.functions[node.function].symbol}" if isinstance(node, KernelNode) else kind(node)


def place(address: Address) -> str:
    """`arena+512`."""
    return f"{MEMORIES[address.memory]}+{address.offset}"


def changes(a: Recording, b: Recording, number: int) -> list[tuple[str, str]]:
    """What differs between the nodes number `number`: ("grid", "4x1x1 -> 8x1x1"), ("parameter 2", "arena+0 -> arena+512").

    Bytes of parameters that no kernel reads do not count.
    """
    one, other = a.nodes[number], b.nodes[number]
    if isinstance(one, KernelNode) and isinstance(other, KernelNode):
        mine, theirs = a.functions[one.function], b.functions[other.function]
        if mine.symbol != theirs.symbol:
            return [("kernel", f"{mine.symbol} -> {theirs.symbol}")]
        same = one == other and mine == theirs
        return [] if same else [*_launch(mine, one, theirs, other), *_parameters(mine, one, theirs, other)]
    if type(one) is not type(other):
        return [("kind", f"{title(a, number)} -> {title(b, number)}")]
    pairs = [(field.name, getattr(one, field.name), getattr(other, field.name)) for field in fields(one)]
    return [(name, f"{_text(before)} -> {_text(after)}") for name, before, after in pairs if before != after]


def _text(value: object) -> str:
    if isinstance(value, Address):
        return place(value)
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _launch(mine: Function, one: KernelNode, theirs: Function, other: KernelNode) -> Iterator[tuple[str, str]]:
    pairs = (
        (IMAGE, mine.image[:DIGITS], theirs.image[:DIGITS]),
        ("grid", one.grid, other.grid),
        ("block", one.threads, other.threads),
        ("shared memory", one.shared, other.shared),
        ("launch attributes", _attributes(one.attributes), _attributes(other.attributes)),
        ("attributes of the kernel", _attributes(mine.attributes), _attributes(theirs.attributes)),
    )
    for name, before, after in pairs:
        if before != after:
            yield name, f"{_text(before)} -> {_text(after)}"


def _attributes(attributes: Iterable[tuple[int, object]]) -> str:
    return ", ".join([f"{number}={_text(value)}" for number, value in sorted(attributes, key=lambda pair: pair[0])]) or "none"


def _parameters(mine: Function, one: KernelNode, theirs: Function, other: KernelNode) -> Iterator[tuple[str, str]]:
    if mine.params != theirs.params or len(one.block) != len(other.block):
        counts = [f"{len(function.params)} in {len(node.block)} bytes" for function, node in ((mine, one), (theirs, other))]
        yield "layout of the parameters", " -> ".join(counts)
        return
    unread = _unread(one) | _unread(other) if mine.image == theirs.image else _unread(one) & _unread(other)
    places = [{relocation.at: place(relocation.target) for relocation in node.relocations} for node in (one, other)]
    for targets, node in zip(places, (one, other), strict=True):
        targets.update({handle.at: f"condition {handle.conditional}" for handle in node.handles})
    moved = {at for at in {**places[0], **places[1]} if places[0].get(at) != places[1].get(at)}
    moved |= {at for at in range(len(one.block)) if one.block[at] != other.block[at] and at not in unread}
    for number, (offset, size) in enumerate(mine.params):
        if inside := {at for at in moved if offset <= at < offset + size}:
            moved -= inside
            first = min(inside)
            at, width, name = offset, size, f"parameter {number}"
            if size > WORD:
                at, width, name = first, min(4, offset + size - first), f"{name} at byte {first - offset}"
            texts = [
                targets.get(at) or _number(node.block[at : at + width]) for targets, node in zip(places, (one, other), strict=True)
            ]
            yield name, " -> ".join(texts)
    if moved:
        yield "bytes between parameters", f"first at {min(moved)}"


def _unread(node: KernelNode) -> set[int]:
    """The bytes of the parameters that no kernel reads."""
    return {at for offset, size in node.undefined for at in range(offset, offset + size)}


def _number(data: bytes) -> str:
    value = int.from_bytes(data, "little", signed=True)
    return str(value) if abs(value) < SMALL else f"0x{data[::-1].hex()}"
