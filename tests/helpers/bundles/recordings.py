"""A recording with one node of every kind, and a module state. `with_kernel` and `with_node` return changed copies."""

from __future__ import annotations

from dataclasses import replace

from cgbundle.validate.module_state import Address, ModuleState, Relocation
from cgcompile.bundle.recordings import Edge, EmptyNode, Function, KernelNode, MemcpyNode, MemsetNode, Recording

IMAGE = "ab" * 32
IMAGES = {IMAGE}
WEIGHTS, STATE, INPUTS, ARENA, HOST = range(5)
MEMORIES = {"weights": 4096, "state": 0, "inputs": 512, "arena": 8192}
WHERE = "graphs/g0-8.bin"

FUNCTION = Function(image=IMAGE, symbol="triton_poi_0", params=((0, 8), (8, 8), (16, 4)), attributes=((8, 65536), (14, 1)))
KERNEL = KernelNode(
    function=0,
    grid=(8, 1, 1),
    threads=(128, 1, 1),
    shared=1024,
    block=bytes(16) + b"\x07\x00\x00\x00" + bytes(8),
    relocations=(
        Relocation(at=0, target=Address(memory=WEIGHTS, offset=256)),
        Relocation(at=8, target=Address(memory=ARENA, offset=8191)),
    ),
    undefined=((20, 4), (24, 4)),
    attributes=((4, (2, 1, 1)), (8, (-1, 0, 0))),
)
MEMSET = MemsetNode(target=Address(memory=ARENA, offset=0), value=0xFFFF, element=2, width=10, height=3, pitch=64)
MEMCPY = MemcpyNode(
    source=Address(memory=INPUTS, offset=0),
    target=Address(memory=ARENA, offset=1024),
    width=16,
    height=4,
    depth=2,
    source_pitch=16,
    source_height=4,
    target_pitch=32,
    target_height=5,
)


def edge(source: int, target: int, from_port: int = 0, to_port: int = 0, type: int = 0) -> Edge:
    return Edge(source=source, target=target, from_port=from_port, to_port=to_port, type=type)


RECORDING_8 = Recording(
    key=(8, 64),
    functions=(FUNCTION,),
    nodes=(MEMSET, KERNEL, MEMCPY, EmptyNode(), replace(KERNEL, attributes=())),
    edges=(edge(0, 1), edge(0, 2), edge(1, 3), edge(2, 3), edge(1, 4, 1, 0, 1)),
)

STATE_ROW = ModuleState(
    image=IMAGE,
    symbol="lut",
    contents=bytes(8) + b"\x01" * 8,
    relocations=(Relocation(at=0, target=Address(memory=ARENA, offset=16)),),
)


def with_kernel(**changes: object) -> Recording:
    nodes = list(RECORDING_8.nodes)
    nodes[1] = replace(KERNEL, **changes)  # type: ignore[arg-type]
    return replace(RECORDING_8, nodes=tuple(nodes))


def with_node(position: int, **changes: object) -> Recording:
    nodes = list(RECORDING_8.nodes)
    nodes[position] = replace(nodes[position], **changes)  # type: ignore[arg-type]
    return replace(RECORDING_8, nodes=tuple(nodes))
