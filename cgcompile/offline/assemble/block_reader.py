"""Reads the arguments back from a launch's parameter block.  Shares no code with `parameter_block`, so that one checks the other.
Imports no torch."""

from __future__ import annotations

import struct

from cgbundle.validate.module_state import Address
from cgcompile.bundle.recordings import Function, KernelNode, Recording

from ...errors import BuildError
from ..lowered import KernelVariant

FORMATS = {
    "i1": "?", "u1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp16": "e", "bf16": "H", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
"""The struct format of a scalar parameter of a Triton type (little-endian).  A bf16 is read as a 16-bit integer."""

SCRATCH = 2
"""Pointers that Triton 3.6 and 3.7 may append to a kernel's own parameters (global and profile scratch memory)."""

DIVISOR = 16
"""Arguments in `KernelVariant.divisible` are multiples of this."""

CLUSTER_DIMENSION = 4
"""CUlaunchAttributeID of the blocks per cluster along each axis.  A Triton instance is a cluster; a launch's grid counts blocks."""

POISON = 0xFF
"""The value of bytes of a block that no kernel reads."""

Argument = Address | int | float | None
"""An address, a number, or a null pointer."""


def arguments(variant: KernelVariant, function: Function, node: KernelNode) -> dict[str, Argument]:
    """Returns the values that a launch passes for the variant's arguments, without constexprs.  Raises parameter-mismatch if the
    block, the parameters (number, offsets, sizes), the relocations and the signature do not match."""
    where = f"kernel {variant.name}"
    names = [(name, kind) for name, kind in variant.signature if kind != "constexpr"]
    if not 0 <= len(function.params) - len(names) <= SCRATCH:
        text = f"the image has {len(function.params)} parameters, the signature {len(names)} (and at most {SCRATCH} more)"
        raise BuildError("parameter-mismatch", f"{where}: {text}")
    block = bytearray(node.block)
    for offset, size in node.undefined:
        block[offset : offset + size] = bytes([POISON]) * size
    targets = {relocation.at: relocation.target for relocation in node.relocations}
    if len(targets) != len(node.relocations):
        raise BuildError("parameter-mismatch", f"{where}: two relocations write the same word")
    values: dict[str, Argument] = {}
    for (name, kind), (offset, size) in zip(names, function.params[: len(names)], strict=True):
        what = f"{where}: argument {name}"
        if offset + size > len(block):
            raise BuildError("parameter-mismatch", f"{what} ends at byte {offset + size} of a block of {len(block)}")
        content = bytes(block[offset : offset + size])
        if kind.startswith("*"):
            values[name] = _pointer(where, name, content, targets.pop(offset, None))
        elif kind not in FORMATS or struct.calcsize(FORMATS[kind]) != size:
            raise BuildError("parameter-mismatch", f"{what} is {kind!r}, its parameter has {size} bytes")
        elif kind == "bf16":
            (values[name],) = struct.unpack("<f", b"\0\0" + content)
        else:
            (values[name],) = struct.unpack(f"<{FORMATS[kind]}", content)
    for offset, _ in function.params[len(names) :]:
        targets.pop(offset, None)  # the interpreter needs no scratch memory
    if targets:
        raise BuildError("parameter-mismatch", f"{where}: a relocation at byte {min(targets)} is no pointer parameter")
    for name in variant.divisible:
        value = values.get(name)
        number = value.offset if isinstance(value, Address) else value
        if number is not None and number % DIVISOR:
            text = f"argument {name} is {number}, but the kernel was compiled for multiples of {DIVISOR}"
            raise BuildError("parameter-mismatch", f"{where}: {text}")
    return values


def programs(node: KernelNode) -> tuple[int, int, int]:
    """The number of program instances along each axis.  Raises parameter-mismatch if the grid is no multiple of the cluster."""
    x, y, z = dict(node.attributes).get(CLUSTER_DIMENSION, (1, 1, 1))
    if node.grid[0] % x or node.grid[1] % y or node.grid[2] % z:
        raise BuildError("parameter-mismatch", f"a grid of {node.grid} blocks is no multiple of its cluster {(x, y, z)}")
    return node.grid[0] // x, node.grid[1] // y, node.grid[2] // z


def check_order(recording: Recording) -> None:
    """Raises order-broken unless every edge goes from a node to a later node, so that the nodes may run in their order."""
    for edge in recording.edges:
        if not 0 <= edge.source < edge.target < len(recording.nodes):
            raise BuildError("order-broken", f"int_key {recording.key}: an edge goes from row {edge.source} to row {edge.target}")


def _pointer(where: str, name: str, content: bytes, target: Address | None) -> Address | None:
    if len(content) != 8:
        raise BuildError("parameter-mismatch", f"{where}: pointer {name} has {len(content)} bytes")
    if any(content):
        raise BuildError("parameter-mismatch", f"{where}: pointer {name} contains a fixed address, expected zeros")
    return target
