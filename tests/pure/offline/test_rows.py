"""The bundle's verifier accepts the rows of a traced program. Every byte of a parameter block is where the image expects it."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.format.schema import MEMORIES, Value
from cgbundle.format.table import Table
from cgbundle.validate.module_state import Address, Relocation
from cgbundle.validate.recordings import check_recording
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import Edge, KernelNode, MemcpyNode, MemsetNode
from cgcompile.errors import BuildError
from cgcompile.offline.assemble.arena import Plan, plan
from cgcompile.offline.assemble.parameter_block import scalar
from cgcompile.offline.assemble.rows import assemble
from cgcompile.offline.compile.cubin_info import KernelInfo, read_kernel_info
from cgcompile.offline.compile.kernels import CompiledKernel
from cgcompile.offline.lowered import (
    INPUT,
    TEMPORARY,
    WEIGHT,
    Allocate,
    Buffer,
    BufferView,
    Copy,
    Event,
    Fill,
    HostRead,
    KernelVariant,
    Launch,
    Lowered,
    LoweredProgram,
    Pointer,
    RegionEvents,
    Release,
)
from cgcompile.targets.cuda.elf import EM_CUDA
from cgcompile.targets.cuda.recorded import RecordedGraph
from tests.helpers.lowered_programs import assembled
from tests.helpers.raising import raises

WEIGHTS_AT, INPUTS_AT, ARENA_AT = map(MEMORIES.index, ("weights", "inputs", "arena"))
SIZES = {"weights": 8192, "inputs": 4096}

SIGNATURE = (("x", "*fp32"), ("flag", "i1"), ("n", "i32"), ("out", "*fp32"), ("scale", "fp32"), ("BLOCK", "constexpr"))
LAYOUT = ((0, 8), (8, 1), (12, 4), (16, 8), (24, 4), (32, 8), (40, 8))
"""The layout that ptxas generates: padding after the flag and the scale, and two scratch pointers."""


def variant(signature: Sequence[tuple[str, str]] = SIGNATURE, divisible: tuple[str, ...] = ()) -> KernelVariant:
    return KernelVariant(
        name="triton_poi_0",
        source="",
        signature=tuple(signature),
        constants=(("BLOCK", 128),),
        divisible=divisible,
        warps=4,
        stages=1,
        options=(),
        selected_by="only",
    )


def compiled(
    signature: Sequence[tuple[str, str]] = SIGNATURE, layout: tuple[tuple[int, int], ...] = LAYOUT, **changes: Any
) -> CompiledKernel:
    params = tuple((type_, name) for name, type_ in signature if type_ != "constexpr")
    plain = CompiledKernel(
        image=b"image",
        sha256=sha256(b"image").hexdigest(),
        symbol="triton_poi_0",
        params=params,
        layout=layout,
        scratch_pointers=len(layout) - len(params),
        shared=1024,
        threads=128,
        cluster=(1, 1, 1),
        cooperative=False,
    )
    return replace(plain, **changes)


BUFFERS = (
    Buffer(kind=WEIGHT, name="layer.weight", nbytes=1024),
    Buffer(kind=INPUT, name="1", nbytes=512),
    Buffer(kind=TEMPORARY, name="buf0", nbytes=1000),
    Buffer(kind=TEMPORARY, name="buf1", nbytes=1024),
)
WEIGHT_BUFFER, INPUT_BUFFER, FIRST, SECOND = range(4)


def place(buffer: int, offset: int = 0) -> Pointer:
    return Pointer(buffer=buffer, offset=offset)


def launch(x: Pointer, out: Pointer, grid: tuple[int, int, int] = (3, 2, 1), n: int = 240) -> Launch:
    return Launch(variant=0, grid=grid, arguments=(x, 1, n, out, 0.5))


def tensor(at: Pointer, size: int) -> BufferView:
    return BufferView(pointer=at, dtype="float32", shape=(size,), strides=(1,))


def traced(*events: Event, variants: tuple[KernelVariant, ...] = (variant(),), output: Pointer | None = None) -> Lowered:
    return Lowered(
        key=(8,),
        buffers=BUFFERS,
        variants=variants,
        events=events,
        inputs=(tensor(place(INPUT_BUFFER), 1), tensor(place(INPUT_BUFFER), 128)),
        outputs=(tensor(output or place(FIRST), 100),),
    )


def rows(program: Lowered, *kernels: CompiledKernel, weights: dict[str, int] | None = None) -> RecordedGraph:
    return assembled(program, kernels or (compiled(),), plan(program), weights or {"layer.weight": 4096}, (0, 256))


def verify(graph: RecordedGraph, kernels: Sequence[CompiledKernel]) -> None:
    """Makes the checks of the builder and the loader, and compares a table with its decoded bytes."""
    data = tables.encode(graph.recording)
    check_recording(Table(data, "t"), SIZES | {"arena": graph.arena}, {kernel.sha256 for kernel in kernels})
    assert tables.decode(data) == graph.recording


# --- rows -----------------------------------------------------------------------------------------------------


def test_a_launch_becomes_a_node_with_every_pointer_relocated() -> None:
    program = traced(
        Allocate(buffer=FIRST),
        launch(place(WEIGHT_BUFFER, 64), place(FIRST)),
        Allocate(buffer=SECOND),
        launch(place(INPUT_BUFFER), place(SECOND, 512)),
        Release(buffer=SECOND),
    )
    graph = rows(program)
    arena_offsets = plan(program).offsets
    first, second = graph.recording.nodes
    assert isinstance(first, KernelNode)
    assert isinstance(second, KernelNode)
    assert (first.grid, first.threads, first.shared, first.function) == ((3, 2, 1), (128, 1, 1), 1024, 0)
    assert first.block == struct.pack("<QBxxxiQfxxxxQQ", 0, 1, 240, 0, 0.5, 0, 0)
    assert (first.undefined, first.attributes) == ((), ())
    assert first.relocations == (
        Relocation(at=0, target=Address(memory=WEIGHTS_AT, offset=4096 + 64)),
        Relocation(at=16, target=Address(memory=ARENA_AT, offset=arena_offsets[FIRST])),
    )
    assert second.relocations == (
        Relocation(at=0, target=Address(memory=INPUTS_AT, offset=256)),
        Relocation(at=16, target=Address(memory=ARENA_AT, offset=arena_offsets[SECOND] + 512)),
    )
    assert graph.recording.edges == (Edge(source=0, target=1, from_port=0, to_port=0, type=0),)
    (function,) = graph.recording.functions
    assert (function.symbol, function.params, function.attributes) == ("triton_poi_0", LAYOUT, ())
    assert graph.recording.key == (8,)
    verify(graph, [compiled()])


def test_every_region_of_a_program_is_a_recording_over_the_same_memory() -> None:
    """A value that one region writes and the next one reads has the same address in both. The host's read between them is no
    node."""
    program = traced(
        launch(place(INPUT_BUFFER), place(FIRST)),
        HostRead(buffer=FIRST),
        launch(place(FIRST, 64), place(SECOND)),
        launch(place(WEIGHT_BUFFER), place(SECOND)),
        output=place(SECOND),
    )
    sections = (
        RegionEvents(name="graph-1", start=0, stop=1, inputs=program.inputs[1:], outputs=(tensor(place(FIRST, 64), 128),)),
        RegionEvents(name="graph-2", start=2, stop=4, inputs=(tensor(place(FIRST, 64), 128),), outputs=program.outputs),
    )
    memory_plan = plan(program)
    first, second = assemble(
        LoweredProgram(lowered=program, regions=sections),
        [compiled()],
        memory_plan,
        {"layer.weight": Address(memory=WEIGHTS_AT, offset=4096)},
        (0, 256),
    )
    assert [len(graph.recording.nodes) for graph in (first, second)] == [1, 2]
    assert [len(graph.recording.edges) for graph in (first, second)] == [0, 1]
    value = Value(dtype="float32", shape=(128,), strides=(1,), memory="arena", offset=memory_plan.offsets[FIRST] + 64)
    assert first.outputs == second.inputs == (value,)
    (producer,), (taken, _) = first.recording.nodes, second.recording.nodes
    assert isinstance(producer, KernelNode) and isinstance(taken, KernelNode)
    assert producer.relocations[1].target == Address(memory=ARENA_AT, offset=memory_plan.offsets[FIRST])
    assert taken.relocations[0].target == Address(memory=ARENA_AT, offset=memory_plan.offsets[FIRST] + 64)
    assert first.arena == second.arena == memory_plan.arena
    for graph in (first, second):
        assert len(graph.recording.functions) == 1
        verify(graph, [compiled()])


def test_copies_and_fills_become_nodes() -> None:
    program = traced(
        Fill(target=place(FIRST, 8), value=-2, element=2, count=10),
        Copy(source=place(WEIGHT_BUFFER, 4), target=place(SECOND, 16), nbytes=100),
        Fill(target=place(SECOND), value=0x1234, element=1, count=3),
        launch(place(SECOND), place(FIRST)),
    )
    graph = rows(program)
    arena_offsets = plan(program).offsets
    fill, copy, narrow, kernel = graph.recording.nodes
    target = Address(memory=ARENA_AT, offset=arena_offsets[FIRST] + 8)
    assert fill == MemsetNode(target=target, value=0xFFFE, element=2, width=10, height=1, pitch=0)
    assert isinstance(narrow, MemsetNode)
    assert (narrow.value, narrow.width) == (0x34, 3)
    assert isinstance(copy, MemcpyNode)
    assert copy.source == Address(memory=WEIGHTS_AT, offset=4100)
    assert copy.target == Address(memory=ARENA_AT, offset=arena_offsets[SECOND] + 16)
    assert (copy.width, copy.height, copy.depth) == (100, 1, 1)
    assert isinstance(kernel, KernelNode)
    assert [(edge.source, edge.target) for edge in graph.recording.edges] == [(0, 1), (1, 2), (2, 3)]
    verify(graph, [compiled()])


def test_large_copies_are_cut_into_rows_that_a_driver_takes() -> None:
    total = (2 << 30) + 5
    program = replace(
        traced(Copy(source=place(FIRST), target=place(SECOND), nbytes=total)),
        buffers=(*BUFFERS[:2], *(replace(buffer, nbytes=total) for buffer in BUFFERS[2:])),
    )
    graph = rows(program)
    pieces = [node for node in graph.recording.nodes if isinstance(node, MemcpyNode)]
    assert [piece.width for piece in pieces] == [1 << 30, 1 << 30, 5]
    assert all(piece.source_pitch < 1 << 31 for piece in pieces)
    assert [piece.source.offset - pieces[0].source.offset for piece in pieces] == [0, 1 << 30, 2 << 30]
    assert [piece.target.offset - pieces[0].target.offset for piece in pieces] == [0, 1 << 30, 2 << 30]
    verify(graph, [compiled()])


def test_what_does_nothing_is_left_out() -> None:
    program = traced(
        launch(place(INPUT_BUFFER), place(FIRST), grid=(3, 0, 1)),
        Copy(source=place(FIRST), target=place(SECOND), nbytes=0),
        Fill(target=place(FIRST), value=1, element=4, count=0),
    )
    graph = rows(program)
    assert (graph.recording.nodes, graph.recording.edges, graph.recording.functions) == ((), (), ())
    verify(graph, [])


def test_only_a_kernel_that_lets_the_next_one_begin_has_a_programmatic_edge() -> None:
    begins = replace(variant(), begins_next=True)
    events = [launch(place(WEIGHT_BUFFER), place(FIRST)), replace(launch(place(WEIGHT_BUFFER), place(FIRST)), variant=1)]
    program = traced(Allocate(buffer=FIRST), *events, *events, variants=(variant(), begins))
    kernels = (compiled(), compiled(image=b"other", sha256=sha256(b"other").hexdigest()))
    graph = rows(program, *kernels)
    verify(graph, kernels)
    assert [(edge.source, edge.target, edge.from_port, edge.type) for edge in graph.recording.edges] == [
        (0, 1, 0, 0), (1, 2, 1, 1), (2, 3, 0, 0),
    ]  # fmt: skip


def test_functions_that_are_equal_stand_once() -> None:
    kernels = [compiled(), compiled(), compiled(symbol="other")]
    events = [replace(launch(place(INPUT_BUFFER), place(FIRST)), variant=i) for i in (0, 1, 2, 0)]
    graph = rows(traced(*events, variants=(variant(),) * 3), *kernels)
    assert [function.symbol for function in graph.recording.functions] == ["triton_poi_0", "other"]
    assert [node.function for node in graph.recording.nodes if isinstance(node, KernelNode)] == [0, 0, 1, 0]
    verify(graph, kernels)


@pytest.mark.parametrize(("shared", "attributes"), [(0, ()), (48 << 10, ()), ((48 << 10) + 16, ((8, (48 << 10) + 16),))])
def test_shared_memory_beyond_48_kib_is_asked_for(shared: int, attributes: tuple[tuple[int, int], ...]) -> None:
    graph = rows(traced(launch(place(INPUT_BUFFER), place(FIRST))), compiled(shared=shared))
    (function,), (node,) = graph.recording.functions, graph.recording.nodes
    assert function.attributes == attributes
    assert isinstance(node, KernelNode)
    assert node.shared == shared


def test_clusters_and_cooperative_launches_carry_their_attributes() -> None:
    kernel = compiled(cluster=(16, 1, 1), cooperative=True)
    graph = rows(traced(launch(place(INPUT_BUFFER), place(FIRST))), kernel)
    (function,), (node,) = graph.recording.functions, graph.recording.nodes
    assert function.attributes == ((14, 1),)
    assert isinstance(node, KernelNode)
    assert node.grid == (48, 2, 1)
    assert node.attributes == ((2, (1, 0, 0)), (4, (16, 1, 1)), (5, (1, 0, 0)))
    verify(graph, [kernel])


def test_the_calls_tensors_lie_where_their_buffers_do() -> None:
    program = traced(launch(place(INPUT_BUFFER), place(FIRST)), output=place(FIRST, 400))
    graph = rows(program)
    slots = plan(program)
    assert graph.arena == slots.arena
    assert graph.inputs[1] == Value(dtype="float32", shape=(128,), strides=(1,), memory="inputs", offset=256)
    assert graph.outputs == (Value(dtype="float32", shape=(100,), strides=(1,), memory="arena", offset=slots.offsets[FIRST] + 400),)
    alias = rows(traced(output=place(INPUT_BUFFER, 4)))
    assert (alias.outputs[0].memory, alias.outputs[0].offset) == ("inputs", 260)


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((place(INPUT_BUFFER), 1, 2, place(FIRST)), "has 4 arguments for 5 parameters"),
        ((7, 1, 2, place(FIRST), 1.0), r"parameter x \(\*fp32\): expected a buffer, got 7"),
        ((place(INPUT_BUFFER), 1, place(FIRST), place(FIRST), 1.0), r"parameter n \(i32\): expected a number, got buffer 2"),
        ((place(INPUT_BUFFER), 2, 2, place(FIRST), 1.0), r"parameter flag \(i1\): 2 is no whole number from 0 to 1"),
        ((place(INPUT_BUFFER), 1, 1 << 31, place(FIRST), 1.0), "2147483648 is no whole number"),
        ((place(INPUT_BUFFER), 1, 2.0, place(FIRST), 1.0), "2.0 is no whole number"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with raises("parameter-mismatch", match=message) as caught:
        rows(traced(Launch(variant=0, grid=(1, 1, 1), arguments=arguments)))
    assert "int_key (8,), event 0 (triton_poi_0)" in str(caught.value)


def test_a_type_whose_size_is_not_the_images_is_refused() -> None:
    layout = ((0, 8), (8, 1), (16, 8), (24, 8), (32, 4))
    with raises("parameter-mismatch", match=r"parameter n \(i32\): 4 bytes, the image has 8 for it"):
        rows(traced(launch(place(INPUT_BUFFER), place(FIRST))), compiled(layout=layout))


def test_arguments_that_the_kernel_believes_to_be_multiples_of_16_are_checked() -> None:
    wanted = (variant(divisible=("x", "n")),)
    rows(traced(launch(place(WEIGHT_BUFFER, 16), place(FIRST)), variants=wanted))
    for bad, weights, name in (
        (launch(place(WEIGHT_BUFFER, 8), place(FIRST)), 4096, "x"),
        (launch(place(WEIGHT_BUFFER, 16), place(FIRST)), 4100, "x"),
        (launch(place(WEIGHT_BUFFER, 16), place(FIRST), n=241), 4096, "n"),
    ):
        with raises("parameter-mismatch", match=rf"parameter {name}: \d+ is no multiple of 16"):
            rows(traced(bad, variants=wanted), weights={"layer.weight": weights})


@pytest.mark.parametrize(
    "event",
    [
        Copy(source=place(WEIGHT_BUFFER), target=place(FIRST), nbytes=1001),
        Copy(source=place(WEIGHT_BUFFER, 1000), target=place(FIRST), nbytes=25),
        Fill(target=place(FIRST, 4), value=0, element=4, count=250),
        launch(place(WEIGHT_BUFFER, 1025), place(FIRST)),
        launch(place(WEIGHT_BUFFER, -1), place(FIRST)),
    ],
)
def test_bytes_outside_a_buffer_are_refused(event: Event) -> None:
    with raises("place-invalid", match=r"int_key \(8,\), event 0.*which has 10"):
        rows(traced(event))


def test_only_state_and_inputs_that_calls_change_may_be_written_to() -> None:
    copied = traced(Copy(source=place(FIRST), target=place(WEIGHT_BUFFER), nbytes=1000))
    input_write = traced(Copy(source=place(FIRST), target=place(INPUT_BUFFER), nbytes=512))

    def record(program: Lowered, changed: int, **options: Any) -> RecordedGraph:
        program = replace(program, written=(changed,))
        return assembled(program, (compiled(),), plan(program), {"layer.weight": 256}, (0, 256), **options)

    with raises("place-invalid", match=r"changes buffer 0 \(weight layer.weight\)"):
        record(copied, WEIGHT_BUFFER)
    (node,) = record(copied, WEIGHT_BUFFER, memory="state").recording.nodes
    assert isinstance(node, MemcpyNode) and node.target == Address(memory=MEMORIES.index("state"), offset=256)
    with raises("place-invalid", match=r"changes buffer 1 \(input 1\)"):
        record(input_write, INPUT_BUFFER, written=(0,))
    record(input_write, INPUT_BUFFER, written=(1,))


def test_fills_that_no_driver_takes_and_buffers_without_a_place_are_refused() -> None:
    with raises("place-invalid", match="elements of 4 bytes at offset"):
        rows(traced(Fill(target=place(FIRST, 2), value=0, element=4, count=1)))
    program = traced(launch(place(WEIGHT_BUFFER), place(FIRST)))
    with raises("place-invalid", match=r"buffer 0 \(weight layer.weight\) has no place"):
        rows(program, weights={"other": 0})
    with raises("place-invalid", match=r"buffer 2 \(temporary buf0\) has no place"):
        assembled(program, [compiled()], Plan(offsets={}, arena=256, bound=0), {"layer.weight": 0}, (0, 256))
    with raises("place-invalid", match=r"buffer 1 \(input 1\) has no place"):
        assembled(program, [compiled()], plan(program), {"layer.weight": 0}, (0,))


# --- numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "value", "expected"),
    [
        ("i1", True, b"\x01"),
        ("i8", -1, b"\xff"),
        ("u8", 255, b"\xff"),
        ("i16", -2, b"\xfe\xff"),
        ("u16", 65535, b"\xff\xff"),
        ("i32", -(1 << 31), b"\0\0\0\x80"),
        ("u32", 1 << 31, b"\0\0\0\x80"),
        ("i64", -3, b"\xfd" + b"\xff" * 7),
        ("u64", (1 << 64) - 1, b"\xff" * 8),
        ("fp64", 1.5, struct.pack("<d", 1.5)),
        ("fp32", 1.0 + 2**-30, struct.pack("<f", 1.0)),
        ("f32", 3, struct.pack("<f", 3.0)),
        ("fp32", 1e300, struct.pack("<f", math.inf)),
        ("fp32", -math.inf, struct.pack("<f", -math.inf)),
        ("fp16", 0.1, bytes.fromhex("662e")),
        ("bf16", 1.0 + 255 / 256, bytes.fromhex("ff3f")),  # truncated, not rounded, like the launcher
    ],
)
def test_numbers_are_laid_out_as_tritons_launcher_does(type_: str, value: float, expected: bytes) -> None:
    assert scalar(type_, value, "x") == expected


@pytest.mark.parametrize(
    ("type_", "value"),
    [("i8", 128), ("u8", -1), ("i64", 1 << 63), ("u1", -1), ("fp16", 1e5), ("tensordesc<fp16[8]>", 0), ("i32", math.nan)],
)
def test_numbers_that_do_not_fit_are_refused(type_: str, value: float) -> None:
    with raises("parameter-mismatch"):
        scalar(type_, value, "x")


# --- layouts in images ----------------------------------------------------------------------------------------


def parameter(ordinal: int, offset: int, size: int) -> bytes:
    return struct.pack("<BBHIHHI", 4, 0x17, 12, 0, ordinal, offset, 0x1F000 | size << 18)


def large_parameter(ordinal: int, offset: int, size: int) -> bytes:
    return struct.pack("<BBHIHHHH", 4, 0x45, 12, 0, ordinal, offset, size, 0)


def total(size: int) -> bytes:
    return struct.pack("<BBH", 3, 0x19, size)


def axes(attribute: int, x: int) -> bytes:
    return struct.pack("<BBHIII", 4, attribute, 12, x, 1, 1)


OTHER = struct.pack("<BBHI", 4, 0x37, 4, 128) + struct.pack("<BBH", 1, 0x3E, 0) + struct.pack("<BBH", 2, 0x4A, 0)
"""Unused attributes, one of each format."""

GOOD = OTHER + parameter(2, 16, 8) + parameter(1, 8, 2) + parameter(0, 0, 8) + axes(0x10, 256) + axes(0x3D, 2) + total(24)


def cubin(info: bytes, section: str = ".nv.info.kernel") -> bytes:
    """Returns an image with the sections null, .shstrtab and the given one."""
    strings = b"\0.shstrtab\0" + section.encode() + b"\0"
    data = bytearray(64) + strings + info
    table = len(data)
    for name, kind, offset, size in ((0, 0, 0, 0), (1, 3, 64, len(strings)), (11, 0x70000000, 64 + len(strings), len(info))):
        data += struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, 0, 0, 1, 0)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    data[:64] = struct.pack("<16sHHIQQQIHHHHHH", ident, 2, EM_CUDA, 1, 0, 0, table, 0, 64, 56, 0, 64, 3, 1)
    return bytes(data)


def test_a_layout_is_read_in_the_parameters_order() -> None:
    assert read_kernel_info(cubin(GOOD), "kernel") == KernelInfo(
        params=((0, 8), (8, 2), (16, 8)), threads=(256, 1, 1), cluster=(2, 1, 1)
    )
    large = cubin(large_parameter(1, 8, 5000) + large_parameter(0, 0, 8) + total(5008))
    assert read_kernel_info(large, "kernel").params == ((0, 8), (8, 5000))
    assert read_kernel_info(cubin(b""), "kernel") == KernelInfo(params=(), threads=None, cluster=None)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (parameter(0, 0, 8), "end at byte 8, the kernel says 0"),
        (parameter(0, 0, 8) + total(12), "end at byte 8, the kernel says 12"),
        (parameter(1, 0, 8) + total(8), r"the parameters \[1\] are not numbered from 0"),
        (parameter(0, 0, 8) * 2 + total(8), "parameter 0 is listed twice"),
        (parameter(0, 0, 8) + parameter(1, 4, 8) + total(12), "parameter 1 has 8 bytes at 4, expected some from byte 8 on"),
        (parameter(0, 0, 0) + total(0), "parameter 0 has 0 bytes"),
        (struct.pack("<BBHI", 4, 0x17, 4, 0), "a record of 4 bytes, expected 12"),
        (struct.pack("<BBH", 4, 0x17, 12), "12 bytes at 4 do not fit the section's 4"),
        (b"\x04\x17", "a record at byte 0 is cut off"),
        (struct.pack("<BBH", 9, 0x17, 0), "format 9"),
    ],
)
def test_layouts_that_make_no_sense_are_refused(info: bytes, message: str) -> None:
    with raises("image-format", match=message):
        read_kernel_info(cubin(info), "kernel")


def test_an_image_without_the_kernel_is_refused() -> None:
    with raises("image-format", match=r"kernel add: 0 sections \.nv\.info\.add"):
        read_kernel_info(cubin(GOOD), "add", "kernel add")


@given(st.integers(0, len(cubin(GOOD)) - 1), st.integers(0, 255))
def test_a_damaged_image_is_read_or_refused(at: int, value: int) -> None:
    data = bytearray(cubin(GOOD))
    data[at] = value
    with contextlib.suppress(BuildError):
        read_kernel_info(bytes(data), "kernel")


@given(st.integers(0, len(cubin(GOOD)) - 1))
def test_a_cut_image_is_refused(length: int) -> None:
    with raises("image-format"):
        read_kernel_info(cubin(GOOD)[:length], "kernel")
