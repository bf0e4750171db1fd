"""Reading parameter blocks reverses packing. A block, image and signature that do not match are refused."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.validate.module_state import Address, Relocation
from cgcompile.bundle.recordings import Edge, EmptyNode, Function, KernelNode, Recording
from cgcompile.offline.assemble.block_reader import arguments, check_order, programs
from cgcompile.offline.lowered import KernelVariant
from tests.helpers.raising import raises

PLACE = Address(memory=3, offset=512)

VARIANT = KernelVariant(
    name="triton_poi_fused_0",
    source="",
    signature=(("x", "*bf16"), ("n", "i32"), ("XBLOCK", "constexpr"), ("out", "*fp32"), ("eps", "fp32")),
    constants=(("XBLOCK", 128),),
    divisible=("x", "n"),
    warps=4,
    stages=1,
    options=(),
    selected_by="only",
)
FUNCTION = Function(
    image="00", symbol="triton_poi_fused_0", params=((0, 8), (8, 4), (16, 8), (24, 4), (32, 8), (40, 8)), attributes=()
)
NODE = KernelNode(
    function=0,
    grid=(8, 4, 2),
    threads=(128, 1, 1),
    shared=0,
    block=bytes(8) + struct.pack("<i4xQf4x16x", 48, 0, 0.5),
    relocations=(Relocation(at=0, target=PLACE), Relocation(at=16, target=Address(memory=0, offset=4))),
    undefined=(),
    attributes=(),
)


def test_reads_places_and_numbers() -> None:
    assert arguments(VARIANT, FUNCTION, NODE) == {"x": PLACE, "n": 48, "out": Address(memory=0, offset=4), "eps": 0.5}


def test_a_pointer_that_is_not_relocated_is_null() -> None:
    assert arguments(VARIANT, FUNCTION, replace(NODE, relocations=NODE.relocations[1:]))["x"] is None


def test_scratch_pointers_may_be_missing_or_relocated() -> None:
    short = replace(FUNCTION, params=FUNCTION.params[:-2])
    assert arguments(VARIANT, short, NODE) == arguments(VARIANT, FUNCTION, NODE)
    scratch = replace(NODE, relocations=(*NODE.relocations, Relocation(at=40, target=PLACE)))
    assert arguments(VARIANT, FUNCTION, scratch) == arguments(VARIANT, FUNCTION, NODE)


def test_bytes_that_no_kernel_reads_are_poisoned() -> None:
    assert arguments(VARIANT, FUNCTION, replace(NODE, undefined=((24, 4),)))["eps"] != 0.5


@given(number=st.floats(width=32, allow_nan=False))
def test_a_bfloat16_scalar_is_cut_off(number: float) -> None:
    variant = replace(VARIANT, signature=(("eps", "bf16"),), divisible=())
    function = replace(FUNCTION, params=((0, 2),))
    node = replace(NODE, block=struct.pack("<f", number)[2:], relocations=())
    assert arguments(variant, function, node) == {"eps": struct.unpack("<f", b"\0\0" + struct.pack("<f", number)[2:])[0]}


SIZES = {
    "i1": "?",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u8": "B",
    "u32": "I",
    "u64": "Q",
    "fp16": "e",
    "fp32": "f",
    "fp64": "d",
}


@given(kinds=st.lists(st.sampled_from([*SIZES, "*fp32"]), max_size=12), data=st.data())
def test_what_was_packed_is_read(kinds: list[str], data: st.DataObject) -> None:
    block, params, relocations, expected = bytearray(), [], [], {}
    for i, kind in enumerate(kinds):
        code = SIZES.get(kind, "Q")
        size = struct.calcsize(code)
        block += bytes(-len(block) % size)
        params.append((len(block), size))
        if kind.startswith("*"):
            expected[f"a{i}"] = Address(memory=3, offset=data.draw(st.integers(0, 1 << 40)))
            relocations.append(Relocation(at=len(block), target=expected[f"a{i}"]))
            block += bytes(8)
            continue
        bits = data.draw(st.binary(min_size=size, max_size=size)) if code not in "?efd" else struct.pack(code, 1)
        expected[f"a{i}"] = struct.unpack(f"<{code}", bits)[0]
        block += bits
    variant = replace(VARIANT, signature=tuple((f"a{i}", kind) for i, kind in enumerate(kinds)), divisible=())
    node = replace(NODE, block=bytes(block), relocations=tuple(relocations))
    assert arguments(variant, replace(FUNCTION, params=tuple(params)), node) == expected


@pytest.mark.parametrize(
    ("function", "node", "words"),
    [
        (replace(FUNCTION, params=FUNCTION.params[:3]), NODE, "the image has 3 parameters, the signature 4"),
        (replace(FUNCTION, params=(*FUNCTION.params, (48, 8))), NODE, "the image has 7 parameters"),
        (replace(FUNCTION, params=((0, 8), (8, 8), *FUNCTION.params[2:])), NODE, "argument n is 'i32', its parameter has 8 bytes"),
        (replace(FUNCTION, params=((0, 4), *FUNCTION.params[1:])), NODE, "pointer x has 4 bytes"),
        (FUNCTION, replace(NODE, block=NODE.block[:20]), "argument out ends at byte 24 of a block of 20"),
        (FUNCTION, replace(NODE, block=b"\1" + NODE.block[1:]), "pointer x contains a fixed address, expected zeros"),
        (
            FUNCTION,
            replace(NODE, relocations=(*NODE.relocations, Relocation(at=8, target=PLACE))),
            "byte 8 is no pointer parameter",
        ),
        (FUNCTION, replace(NODE, relocations=NODE.relocations * 2), "two relocations write the same word"),
        (
            FUNCTION,
            replace(NODE, relocations=(Relocation(at=0, target=Address(memory=3, offset=8)),)),
            "argument x is 8, but",
        ),
        (FUNCTION, replace(NODE, block=bytes(8) + b"\3" + NODE.block[9:]), "argument n is 3, but"),
    ],
)
def test_refuses_what_does_not_fit(function: Function, node: KernelNode, words: str) -> None:
    with raises("parameter-mismatch", match=words):
        arguments(VARIANT, function, node)


def test_a_program_is_a_cluster_of_blocks() -> None:
    assert programs(NODE) == (8, 4, 2)
    assert programs(replace(NODE, attributes=((4, (2, 1, 1)),))) == (4, 4, 2)
    with raises("parameter-mismatch", match="no multiple of its cluster"):
        programs(replace(NODE, attributes=((4, (3, 1, 1)),)))


@pytest.mark.parametrize(("source", "target", "fits"), [(0, 1, True), (0, 2, True), (1, 0, False), (1, 1, False), (2, 3, False)])
def test_rows_stand_in_the_order_of_their_edges(source: int, target: int, fits: bool) -> None:
    edge = Edge(source=source, target=target, from_port=0, to_port=0, type=0)
    recording = Recording(key=(8,), functions=(), nodes=(EmptyNode(),) * 3, edges=(edge,))
    if fits:
        check_order(recording)
    else:
        with raises("order-broken", match=rf"\(8,\): an edge goes from row {source} to row {target}"):
            check_order(recording)
