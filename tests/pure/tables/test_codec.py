"""The tables of recordings: exact round trips, the bytes of a header, and one test per class of defect."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgbundle.errors import BundleError
from cgbundle.tables import codec as tables
from cgbundle.tables.module_state import decode_states, encode_states
from cgbundle.tables.recording import (
    Address,
    Edge,
    EmptyNode,
    Function,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    ModuleState,
    Recording,
    Relocation,
)
from cgbundle.tables.table import RECORDING, Table, launch_order
from cgbundle.validate.recordings import check_module_states, check_recording
from tests.helpers.raising import raises

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


def check(recording: Recording) -> None:
    check_recording(Table(tables.encode(recording), WHERE), MEMORIES, IMAGES)


def reject(recording: Recording, message: str, code: str = "table-invalid") -> None:
    with raises(code, match=message) as caught:
        check(recording)
    assert str(caught.value).startswith(f"{WHERE}: ") and "\n" not in str(caught.value)


def with_kernel(**changes: object) -> Recording:
    nodes = list(RECORDING_8.nodes)
    nodes[1] = replace(KERNEL, **changes)  # type: ignore[arg-type]
    return replace(RECORDING_8, nodes=tuple(nodes))


def with_node(position: int, **changes: object) -> Recording:
    nodes = list(RECORDING_8.nodes)
    nodes[position] = replace(nodes[position], **changes)  # type: ignore[arg-type]
    return replace(RECORDING_8, nodes=tuple(nodes))


# --- round trips ----------------------------------------------------------------------------------------------

u8, u32, u64 = st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
i32, i64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
addresses = st.builds(Address, memory=st.integers(0, 4), offset=u64)
relocations = st.lists(st.builds(Relocation, at=u32, target=addresses), max_size=3).map(tuple)
pairs = st.lists(st.tuples(u32, u32), max_size=3).map(tuple)
functions = st.builds(
    Function,
    image=st.binary(min_size=32, max_size=32).map(bytes.hex),
    symbol=st.text(max_size=12),
    params=pairs,
    attributes=st.lists(st.tuples(u32, i32), max_size=2).map(tuple),
)
kernels = st.builds(
    KernelNode,
    function=st.just(0),
    grid=st.tuples(u32, u32, u32),
    threads=st.tuples(u32, u32, u32),
    shared=u32,
    block=st.binary(max_size=40),
    relocations=relocations,
    undefined=pairs,
    attributes=st.lists(st.tuples(u32, st.tuples(i64, i64, i64)), max_size=2).map(tuple),
)
memsets = st.builds(MemsetNode, target=addresses, value=u32, element=u32, width=u64, height=u64, pitch=u64)
memcpys = st.builds(
    MemcpyNode,
    source=addresses,
    target=addresses,
    width=u64,
    height=u64,
    depth=u64,
    source_pitch=u64,
    source_height=u64,
    target_pitch=u64,
    target_height=u64,
)


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    listed = draw(st.lists(functions, min_size=1, max_size=3))
    nodes = draw(st.lists(st.one_of(kernels, memsets, memcpys, st.builds(EmptyNode)), max_size=6))
    node = st.integers(0, max(0, len(nodes) - 1))
    edges = (
        draw(st.lists(st.builds(Edge, source=node, target=node, from_port=u8, to_port=u8, type=u8), max_size=6)) if nodes else []
    )
    return Recording(
        key=tuple(draw(st.lists(u64, max_size=3))),
        functions=tuple(listed),
        nodes=tuple(
            replace(item, function=draw(st.integers(0, len(listed) - 1))) if isinstance(item, KernelNode) else item
            for item in nodes
        ),
        edges=tuple(edges),
    )


@given(recordings())
@settings(max_examples=60, deadline=None)
def test_every_recording_survives_exactly(recording: Recording) -> None:
    data = tables.encode(recording)
    assert tables.decode(data) == recording
    assert tables.encode(tables.decode(data)) == data
    assert len(data) % 8 == 0


states = st.builds(
    ModuleState,
    image=st.binary(min_size=32, max_size=32).map(bytes.hex),
    symbol=st.text(max_size=12),
    contents=st.binary(max_size=20),
    relocations=st.just(()),
)


@given(st.lists(states, max_size=4))
@settings(max_examples=50, deadline=None)
def test_every_module_state_survives_exactly(rows: list[ModuleState]) -> None:
    data = encode_states(rows)
    assert decode_states(data) == tuple(rows)


STATE_ROW = ModuleState(
    image=IMAGE,
    symbol="lut",
    contents=bytes(8) + b"\x01" * 8,
    relocations=(Relocation(at=0, target=Address(memory=ARENA, offset=16)),),
)


def test_a_module_state_keeps_its_relocations() -> None:
    data = encode_states([STATE_ROW])
    assert decode_states(data) == (STATE_ROW,)
    check_module_states(decode_states(data), "graphs/modules.bin", MEMORIES, IMAGES)


@pytest.mark.parametrize(
    ("at", "message"),
    [(8, "no free zeroed word"), (9, "no free zeroed word"), (2**63, "no free zeroed word")],
    ids=["taken", "outside", "far"],
)
def test_a_module_states_relocation_must_lie_in_zeros(at: int, message: str) -> None:
    bad = replace(STATE_ROW, relocations=(Relocation(at=at, target=Address(memory=ARENA, offset=0)),))
    with raises("table-invalid", match=message):
        decode_states(encode_states([bad]), "graphs/modules.bin")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([replace(STATE_ROW, image="cd" * 32)], r"states\[0\].image"),
        ([STATE_ROW, STATE_ROW], r"states\[1\].symbol"),
        (
            [replace(STATE_ROW, relocations=(Relocation(at=0, target=Address(memory=HOST, offset=0)),))],
            "memory host, which the bundle does",
        ),
        (
            [replace(STATE_ROW, relocations=(Relocation(at=0, target=Address(memory=ARENA, offset=8192)),))],
            "byte 8192 of memory arena",
        ),
    ],
    ids=["image", "twice", "host", "outside"],
)
def test_module_states_are_checked(rows: list[ModuleState], message: str) -> None:
    with raises("table-invalid", match=message):
        check_module_states(rows, "graphs/modules.bin", MEMORIES, IMAGES)


# --- the bytes ------------------------------------------------------------------------------------------------


def test_the_header_byte_for_byte() -> None:
    data = tables.encode(Recording(key=(8,), functions=(), nodes=(EmptyNode(),), edges=()))
    assert data == (
        b"cgtable\0"
        + b"\x01\0\0\0\0\0\0\0"  # version
        + b"\xc8\0\0\0\0\0\0\0"  # bytes of the file
        + b"\x01\0\0\0\0\0\0\0"  # keys
        + bytes(8 * 4)  # functions, params, function attributes, symbol bytes
        + b"\x01\0\0\0\0\0\0\0"  # nodes
        + bytes(8 * 8)  # kernels, relocations, undefined, attributes, memsets, memcpys, edges, block bytes
        + b"\x08\0\0\0\0\0\0\0"  # key
        + bytes(8 * 3)  # bounds of symbols, parameters and function attributes: one 0 each, padded
        + b"\0\0\0\0\0\0\0\0"  # kind of the node, padded
        + bytes(8 * 3)  # bounds of relocations, undefined ranges and attributes
    )


def test_the_columns_stand_in_the_order_of_the_layout() -> None:
    data = tables.encode(RECORDING_8)
    counts = struct.unpack("<14Q", data[24:136])
    assert counts == (2, 1, 3, 2, 12, 5, 2, 4, 4, 2, 1, 1, 5, 64)
    assert data[136:152] == struct.pack("<2Q", 8, 64)
    assert data[152:184] == bytes.fromhex(IMAGE)
    assert data[-64:] == 2 * (KERNEL.block + bytes(4))


def test_the_view_names_every_column() -> None:
    named = {name for name, kind in Table.__annotations__.items() if kind == "memoryview"}
    assert named == {column.name for column in RECORDING.columns} - {"symbols"}


# --- damage ---------------------------------------------------------------------------------------------------


def survive(data: bytes) -> None:
    """Damaged bytes are refused with table-invalid, or decode to a recording that is spelled exactly so and can be checked."""
    try:
        recording = tables.decode(data)
    except BundleError:
        return
    assert tables.encode(recording) == data
    try:
        check_recording(Table(data), MEMORIES, IMAGES)
    except BundleError:
        return


def test_every_byte_may_be_damaged() -> None:
    data = tables.encode(RECORDING_8)
    for position in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= flip
            survive(bytes(damaged))


def test_every_truncation_is_refused() -> None:
    data = tables.encode(RECORDING_8)
    for length in range(len(data)):
        with raises("table-invalid"):
            Table(data[:length])
    with raises("table-invalid"):
        Table(data + bytes(8))


def test_many_damages_at_once() -> None:
    data = tables.encode(RECORDING_8)
    random_bytes = random.Random(0)
    for _ in range(500):
        damaged = bytearray(data)
        for _ in range(random_bytes.randrange(1, 6)):
            damaged[random_bytes.randrange(16, len(data))] = random_bytes.choice((0, 1, 2, 255, random_bytes.randrange(256)))
        survive(bytes(damaged))


def test_every_byte_of_module_states_may_be_damaged() -> None:
    data = encode_states([STATE_ROW])
    for position in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= flip
            try:
                rows = decode_states(bytes(damaged))
            except BundleError:
                continue
            assert encode_states(rows) == bytes(damaged)
    for length in range(len(data)):
        with raises("table-invalid"):
            decode_states(data[:length])


# --- one test per defect --------------------------------------------------------------------------------------


def test_a_sound_recording_passes() -> None:
    check(RECORDING_8)
    check(Recording(key=(), functions=(), nodes=(), edges=()))


def test_a_relocation_into_an_empty_memory_is_its_start() -> None:
    def pointing(offset: int) -> Recording:
        return with_kernel(relocations=(Relocation(at=0, target=Address(memory=STATE, offset=offset)),))

    check(pointing(0))
    reject(
        pointing(1), r"nodes\[1\].relocations: the word at 0 points at byte 1 of memory state, which has 0", "relocation-invalid"
    )


@pytest.mark.parametrize(
    ("recording", "message"),
    [
        (with_kernel(grid=(0, 1, 1)), r"nodes\[1\].grid: \(0, 1, 1\)"),
        (with_kernel(grid=(1, 65536, 1)), r"nodes\[1\].grid"),
        (with_kernel(threads=(1025, 1, 1)), r"nodes\[1\].threads"),
        (with_kernel(threads=(32, 32, 2)), r"nodes\[1\].threads: .* are more than 1024 in all"),
        (with_kernel(block=bytes(19), undefined=()), r"nodes\[1\].block: 19 bytes, the function's parameters end at 20"),
        (with_kernel(function=1), r"nodes.function: 1 is not below 1"),
        (with_kernel(attributes=((1, (0, 0, 0)),)), r"nodes\[1\].attributes: 1 is none of"),
        (with_kernel(attributes=((14, (2**32, 0, 0)),)), "nodes.attributes: .* more than 32 bits"),
        (with_kernel(attributes=((8, (0, 0, 0)), (4, (1, 1, 1)))), r"nodes\[1\].attributes: 4 after 8"),
    ],
    ids=[
        "grid-zero",
        "grid-large",
        "threads-x",
        "threads-product",
        "block-short",
        "function",
        "attribute",
        "attribute-value",
        "attribute-order",
    ],
)
def test_launches(recording: Recording, message: str) -> None:
    reject(recording, message)


def relocated(*places: tuple[int, int, int]) -> Recording:
    return with_kernel(relocations=tuple(Relocation(at=at, target=Address(memory=m, offset=o)) for at, m, o in places))


@pytest.mark.parametrize(
    ("recording", "message"),
    [
        (relocated((24, ARENA, 0)), r"nodes\[1\].relocations: 8 bytes at 24"),
        (relocated((0, ARENA, 0), (4, ARENA, 0)), r"8 bytes at 4, expected between 8 and 28"),
        (relocated((8, ARENA, 0), (0, ARENA, 0)), r"8 bytes at 0, expected between 16"),
        (relocated((0, ARENA, 8192)), "points at byte 8192 of memory arena, which has 8192"),
        (relocated((0, HOST, 0)), "points at memory host, which the bundle does not have"),
    ],
    ids=["outside", "overlap", "order", "target", "host"],
)
def test_relocations(recording: Recording, message: str) -> None:
    reject(recording, message, "relocation-invalid")


def test_a_relocated_word_is_zero() -> None:
    reject(relocated((12, ARENA, 0)), "the relocated word at 12 is not zero")


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (((24, 5),), r"nodes\[1\].undefined: 5 bytes at 24"),
        (((20, 0),), "0 bytes at 20"),
        (((24, 4), (20, 4)), "4 bytes at 20, expected between 28"),
        (((16, 4),), "the undefined bytes at 16 are not zero"),
        (((4, 8),), "the bytes at 4 hold a relocation"),
    ],
    ids=["outside", "empty", "order", "not-zero", "relocation"],
)
def test_undefined_ranges(ranges: tuple[tuple[int, int], ...], message: str) -> None:
    reject(with_kernel(undefined=ranges), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": "cd" * 32}, r"functions\[0\].image: cdcd"),
        ({"symbol": ""}, r"functions\[0\].symbol"),
        ({"symbol": "a\x1b[2J"}, r"functions\[0\].symbol"),
        ({"params": ((8, 8), (0, 8))}, r"functions\[0\].params: 8 bytes at 0"),
        ({"params": ((0, 0),)}, r"functions\[0\].params: 0 bytes"),
        ({"attributes": ((3, 1),)}, r"functions\[0\].attributes: 3 is none of"),
    ],
    ids=["image", "no-symbol", "control", "overlap", "empty", "attribute"],
)
def test_functions(changes: dict[str, object], message: str) -> None:
    reject(replace(RECORDING_8, functions=(replace(FUNCTION, **changes),)), message)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"element": 3}, r"nodes\[0\].element: 3 bytes, expected 1, 2 or 4"),
        ({"width": 0}, "nothing to write"),
        ({"height": 0}, "nothing to write"),
        ({"pitch": 18}, "rows 18 bytes apart, each of 20"),
        ({"pitch": 65}, "65 is no multiple of 2"),
        ({"target": Address(memory=ARENA, offset=8192 - 147)}, "ends at byte 8193 of memory arena"),
        ({"height": 2**64 - 1, "pitch": 2**64 - 2}, "ends at byte"),
        ({"target": Address(memory=HOST, offset=0)}, "memory host, which the bundle does not have"),
    ],
    ids=["element", "width", "height", "pitch", "odd-pitch", "outside", "huge", "host"],
)
def test_memsets(changes: dict[str, object], message: str) -> None:
    reject(with_node(0, **changes), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, r"nodes\[2\].source: 0 x 4 x 2"),
        ({"source_pitch": 15}, r"nodes\[2\].source: rows 15 bytes apart"),
        ({"target_height": 3}, r"nodes\[2\].target: slices 3 rows apart"),
        ({"source": Address(memory=INPUTS, offset=385)}, r"nodes\[2\].source: ends at byte 513 of memory inputs"),
        ({"target": Address(memory=ARENA, offset=2**63)}, r"nodes\[2\].target: ends at byte"),
    ],
    ids=["width", "pitch", "slices", "source", "target"],
)
def test_memcpys(changes: dict[str, object], message: str) -> None:
    reject(with_node(2, **changes), message)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ((edge(0, 5),), "edges.target: 5 is not below 5"),
        ((edge(9, 0),), "edges.source: 9 is not below 5"),
        ((edge(0, 1), edge(0, 1)), "one stands twice"),
        ((edge(0, 1), edge(1, 2), edge(2, 1)), "4 nodes lie on or behind a cycle|nodes lie on or behind a cycle"),
        ((edge(1, 1),), "1 nodes lie on or behind a cycle"),
        ((edge(1, 4, 0, 0, 2),), r"edges\[0\]: type 2"),
        ((edge(1, 4, 3, 0, 0),), r"edges\[0\].from_port: 3"),
        ((edge(0, 1, 1, 0, 1),), r"edges\[0\].from_port: 1 of a node of kind 2"),
        ((edge(1, 2, 1, 0, 1),), r"edges\[0\].type: programmatic"),
        ((edge(1, 4, 0, 0, 1),), r"edges\[0\].type: programmatic"),
    ],
    ids=["target", "source", "twice", "cycle", "self", "type", "port", "not-a-kernel", "to-a-copy", "no-port"],
)
def test_edges(edges: tuple[Edge, ...], message: str) -> None:
    reject(replace(RECORDING_8, edges=edges), message)


@given(st.permutations(range(6)), st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=10))
@settings(max_examples=40, deadline=None)
def test_order_puts_every_edge_forward(names: list[int], arcs: set[tuple[int, int]]) -> None:
    edges = tuple(edge(names[a], names[b]) for a, b in arcs if a < b)  # acyclic by construction, in any numbering
    table = Table(tables.encode(Recording(key=(), functions=(), nodes=(EmptyNode(),) * 6, edges=edges)))
    found = launch_order(table)
    assert sorted(found) == list(range(6))
    assert all(found.index(item.source) < found.index(item.target) for item in edges)


@pytest.mark.parametrize(
    ("recording", "message"),
    [
        (with_kernel(shared=-1), "shared"),
        (with_kernel(shared=2**32), "shared"),
        (with_kernel(grid=(2**32, 1, 1)), "grid_x"),
        (with_kernel(attributes=((4, (1, 1)),)), "attribute_value: 16 bytes, expected 24"),
        (replace(RECORDING_8, functions=(replace(FUNCTION, image="AB" * 32),)), "expected a SHA-256"),
        (replace(RECORDING_8, functions=(replace(FUNCTION, image="../x"),)), "expected a SHA-256"),
        (replace(RECORDING_8, functions=(replace(FUNCTION, symbol="\ud800"),)), "not UTF-8"),
    ],
    ids=["negative", "too-large", "grid", "values", "upper-case", "path", "surrogate"],
)
def test_what_has_no_place_in_the_format_is_not_written(recording: Recording, message: str) -> None:
    with raises("table-invalid", match=message):
        tables.encode(recording)
