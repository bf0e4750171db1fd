"""Memsets become launches that write the same bytes. A simulated GPU runs them here, a real one in tests/gpu."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from cgbundle.validate.module_state import Address
from cgcompile.bundle.recordings import Edge, EmptyNode, Function, KernelNode, MemsetNode, Recording
from cgcompile.targets.kernels.fills import PARAMS, has_memsets, memset_of, without_memsets

ARENA = 3
IMAGE = b"an image"


@st.composite
def memsets(draw: st.DrawFn) -> MemsetNode:
    element = draw(st.sampled_from((1, 2, 4)))
    offset = element * draw(st.integers(0, 100))
    width = draw(st.integers(1, 2000))
    value = draw(st.integers(-(1 << 31), (1 << 32) - 1))  # the driver reports a byte of -1 with other bits set, too
    return MemsetNode(target=Address(memory=ARENA, offset=offset), value=value, element=element, width=width, height=1, pitch=0)


def recording(*nodes: object) -> Recording:
    other = Function(image="0" * 64, symbol="other", params=((0, 8),), attributes=())
    edges = tuple(Edge(source=i, target=i + 1, from_port=0, to_port=0, type=0) for i in range(len(nodes) - 1))
    return Recording(key=(1,), functions=(other,), nodes=nodes, edges=edges)  # type: ignore[arg-type]


def run_memset(node: MemsetNode, memory: bytearray) -> None:
    pattern = (node.value % (1 << 8 * node.element)).to_bytes(node.element, "little")
    memory[node.target.offset : node.target.offset + node.width * node.element] = pattern * node.width


def run_launch(function: Function, node: KernelNode, memory: bytearray) -> None:
    """Does what the PTX of fills.py does, thread by thread."""
    piece = int(function.symbol.rpartition("_")[2])
    _, count, pattern = struct.unpack("<QQI", node.block)
    (link,) = node.relocations
    assert link.at == 0 and link.target.offset % piece == 0
    for index in range(node.grid[0] * node.threads[0]):
        if index < count:
            at = link.target.offset + index * piece
            memory[at : at + piece] = (pattern.to_bytes(4, "little") * 4)[:piece]


@given(memsets())
def test_a_launch_writes_what_the_memset_wrote(node: MemsetNode) -> None:
    kernel_recording = without_memsets(recording(node), IMAGE)
    (launch,) = kernel_recording.nodes
    assert isinstance(launch, KernelNode)
    wanted, got = bytearray(b"\xa5" * 9000), bytearray(b"\xa5" * 9000)
    run_memset(node, wanted)
    run_launch(kernel_recording.functions[launch.function], launch, got)
    assert wanted == got


@given(memsets())
def test_and_can_be_read_as_a_memset_again(node: MemsetNode) -> None:
    kernel_recording = without_memsets(recording(node), IMAGE)
    (launch,) = kernel_recording.nodes
    assert isinstance(launch, KernelNode)
    again = memset_of(kernel_recording.functions[launch.function], launch)
    assert again is not None
    wanted, got = bytearray(9000), bytearray(9000)
    run_memset(node, wanted)
    run_memset(again, got)
    assert wanted == got


def test_other_nodes_and_the_edges_stay() -> None:
    kernel = KernelNode(
        function=0, grid=(1, 1, 1), threads=(32, 1, 1), shared=0, block=bytes(8), relocations=(), undefined=(), attributes=()
    )
    rows = MemsetNode(target=Address(memory=ARENA, offset=0), value=0, element=4, width=8, height=2, pitch=256)
    flat = MemsetNode(target=Address(memory=ARENA, offset=64), value=0, element=4, width=8, height=1, pitch=0)
    before = recording(kernel, flat, rows, EmptyNode(), flat)
    after = without_memsets(before, IMAGE)
    assert has_memsets([before]) and not has_memsets([after])
    assert after.edges == before.edges and after.functions[0] == before.functions[0] and len(after.functions) == 2
    assert [after.nodes[i] for i in (0, 2, 3)] == [kernel, rows, EmptyNode()]
    assert after.nodes[1] == after.nodes[4]
    assert memset_of(after.functions[0], kernel) is None
    assert after.functions[1].params == PARAMS
