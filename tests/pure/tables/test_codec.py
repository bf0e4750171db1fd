"""Files of recordings and module states: exact round trips, the bytes of a header, damage, and the order of nodes."""

from __future__ import annotations

import ast
import random
import struct
from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgbundle.errors import BundleError
from cgbundle.format.table import BRANCHING, Table, launch_order
from cgbundle.validate.module_state import Address, ModuleState, Relocation, check_module_states, decode_states
from cgbundle.validate.recordings import check_recording
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import (
    TYPES,
    ConditionalNode,
    Edge,
    EmptyNode,
    Function,
    Handle,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    Recording,
    encode_states,
)
from tests.helpers.bundles.recordings import (
    ARENA,
    FUNCTION,
    IMAGE,
    IMAGES,
    KERNEL,
    MEMORIES,
    RECORDING_8,
    STATE_ROW,
    edge,
    with_kernel,
)
from tests.helpers.imports import modules
from tests.helpers.raising import raises

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
conditionals = st.builds(ConditionalNode, type=st.sampled_from(TYPES), bodies=st.just(()))
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
    nodes = draw(st.lists(st.one_of(kernels, memsets, memcpys, conditionals, st.builds(EmptyNode)), max_size=6))
    node = st.integers(0, max(0, len(nodes) - 1))
    edges = (
        draw(st.lists(st.builds(Edge, source=node, target=node, from_port=u8, to_port=u8, type=u8), max_size=6)) if nodes else []
    )
    bodies: tuple[int, ...] = ()
    if branching := [place for place, item in enumerate(nodes) if isinstance(item, ConditionalNode)]:
        bodies = tuple(sorted(draw(st.lists(st.integers(0, len(nodes)), max_size=3))))
        edges = [edge for edge in edges if bisect_right(bodies, edge.source) == bisect_right(bodies, edge.target)]
        ends = [
            0,
            *sorted(draw(st.lists(st.integers(0, len(bodies)), min_size=len(branching) - 1, max_size=len(branching) - 1))),
            len(bodies),
        ]
        for place, (begin, end) in zip(branching, pairwise(ends), strict=True):
            listed_bodies = (
                tuple(draw(st.lists(st.integers(0, len(bodies) - 1), min_size=end - begin, max_size=end - begin))) if bodies else ()
            )
            nodes[place] = replace(nodes[place], bodies=listed_bodies)  # type: ignore[call-arg]
        numbers = st.integers(0, len(branching) - 1)
        for place, item in enumerate(nodes):
            if isinstance(item, KernelNode):
                places = sorted(draw(st.sets(u32, max_size=2)))
                handles = tuple([Handle(at=at, conditional=draw(numbers)) for at in places])
                nodes[place] = replace(item, handles=handles)
    return Recording(
        key=tuple(draw(st.lists(u64, max_size=3))),
        functions=tuple(listed),
        nodes=tuple(
            replace(item, function=draw(st.integers(0, len(listed) - 1))) if isinstance(item, KernelNode) else item
            for item in nodes
        ),
        edges=tuple(edges),
        bodies=bodies,
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


def test_only_columns_are_asked_of_a_table() -> None:
    """A type checker accepts any name as a column, so a wrong one must raise."""
    known = {column.name for column in BRANCHING.columns} | {"counts", "images", "symbols", "where"}
    assert set(Table.__slots__) == known
    asked = set()
    for text in [path.read_text(encoding="utf-8") for path in modules().values()]:
        for function in ast.walk(ast.parse(text)) if "table import" in text else ():
            if isinstance(function, ast.FunctionDef):
                parameters = {arg.arg for arg in function.args.args if arg.annotation and ast.unparse(arg.annotation) == "Table"}
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in parameters:
                        asked.add(node.attr)
    assert len(asked) > 30
    assert asked <= known | {"graph", "spans"}


# --- damage ---------------------------------------------------------------------------------------------------


def survive(data: bytes) -> None:
    """Checks that damaged bytes are refused with table-invalid, or decode to a checked recording with the same bytes."""
    try:
        recording = tables.decode(data)
        assert tables.encode(recording) == data
        check_recording(Table(data), MEMORIES, IMAGES)
    except BundleError as error:
        assert error.code in ("table-invalid", "relocation-invalid")


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


# --- what cannot be written, and the order ---------------------------------------------------------------------


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


@given(st.permutations(range(6)), st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=10))
@settings(max_examples=40, deadline=None)
def test_order_puts_every_edge_forward(names: list[int], arcs: set[tuple[int, int]]) -> None:
    edges = tuple(edge(names[a], names[b]) for a, b in arcs if a < b)  # acyclic, whatever the numbers of nodes are
    table = Table(tables.encode(Recording(key=(), functions=(), nodes=(EmptyNode(),) * 6, edges=edges)))
    order = launch_order(table)
    assert sorted(order) == list(range(6))
    assert all(order.index(item.source) < order.index(item.target) for item in edges)


def test_three_rows_of_every_kind_survive() -> None:
    fill, copy = RECORDING_8.nodes[0], RECORDING_8.nodes[2]
    nodes = (*RECORDING_8.nodes, *[replace(node, width=width) for width in (1, 2) for node in (fill, copy)], KERNEL)  # type: ignore[type-var]
    recording = replace(RECORDING_8, nodes=nodes)
    assert tables.decode(tables.encode(recording)) == recording


def test_conditional_nodes_keep_their_own_bodies() -> None:
    nodes = (ConditionalNode(type="if", bodies=(0, 1)), ConditionalNode(type="while", bodies=(2,)))
    recording = Recording(key=(), functions=(), nodes=nodes, edges=(), bodies=(2, 2, 2))
    assert tables.decode(tables.encode(recording)) == recording
