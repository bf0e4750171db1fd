"""Which program a call or a key selects, in which memory inputs may be, and which axes give a dimension's size: cases that
test_guards.py omits."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.call import plan as guards
from cgbundle.call.plan import number_of_key, plan
from cgbundle.tensors.library import Descriptor
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.fabricate import dimension, signature, spec
from tests.helpers.raising import raises

MODEL = signature(
    [dimension("batch", 2, 8), dimension("seq", 4, 16)],
    [spec("scale", 3), spec("x", "batch", ("*", "seq", 2)), spec("mask", ("+", "seq", 1)), spec("first", "batch")],
    [spec("y", "batch", "seq", 5), spec("rows", ("*", 3, "batch"))],
)


# --- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_has_a_number() -> None:
    for number, program in enumerate(MODEL.entries[0].programs):
        assert number_of_key(MODEL.entries[0], program.key) == number
    for key in ((2,), (4, 2), (2, 5), (), (2, 4, 1)):
        with raises("key-missing") as caught:
            number_of_key(MODEL.entries[0], key)
        assert str(caught.value) == f"expected a recorded int_key ((2, 4), (2, 16), (8, 4), (8, 16)), got {key!r}"


@pytest.mark.parametrize("count", [11, 12, 13, 40])
def test_of_many_keys_twelve_are_named(count: int) -> None:
    model = signature([dimension("n", *range(1, count + 1))], [spec("x", "n")], [spec("y", "n")])
    with raises("key-missing") as caught:
        number_of_key(model.entries[0], (99,))
    text = str(caught.value)
    assert text.count(",)") == 1 + min(count, 12) and ("..." in text) == (count > 12)


@given(st.integers(1, 40), st.integers(1, 70), st.sampled_from(["pad", "chunk"]))
def test_every_part_takes_from_each_input_what_its_outputs_need(batch: int, seq: int, on_miss: str) -> None:
    call_plan = plan(MODEL.entries[0], ((3,), (batch, 2 * seq), (seq + 1,), (batch,)), on_miss)
    assert call_plan.shapes == ((batch, seq, 5), (3 * batch,))
    whole = batch in (2, 8) and seq in (4, 16)
    assert call_plan.exact == whole
    for part in call_plan.parts:
        key = MODEL.entries[0].programs[part.program].key
        (rows, columns, _), (threefold,) = part.outputs[0][1], part.outputs[1][1]
        count, length = rows.stop - rows.start, columns.stop - columns.start
        assert part.outputs[0][0] == (slice(0, count), slice(0, length), slice(0, 5))
        assert part.outputs[1][0] == (slice(0, 3 * count),)
        assert (threefold.start, threefold.stop) == (3 * rows.start, 3 * rows.stop)
        assert part.inputs == (
            ((slice(0, 3),), (3,)),
            ((rows, slice(2 * columns.start, 2 * columns.stop)), (key[0], 2 * key[1])),
            ((slice(columns.start, columns.start + length + 1),), (key[1] + 1,)),
            ((rows,), (key[0],)),
        )
        assert count <= key[0] and length <= key[1]


def test_a_call_of_a_recorded_size_is_exact() -> None:
    for (number, program), on_miss in product(enumerate(MODEL.entries[0].programs), ("pad", "chunk", "error")):
        batch, seq = program.key
        call_plan = plan(MODEL.entries[0], ((3,), (batch, 2 * seq), (seq + 1,), (batch,)), on_miss)
        assert call_plan.exact and [part.program for part in call_plan.parts] == [number]


def test_a_call_cut_into_recorded_sizes_is_not_exact() -> None:
    call_plan = plan(MODEL.entries[0], ((3,), (10, 8), (5,), (10,)), "chunk")
    assert not call_plan.exact and [MODEL.entries[0].programs[part.program].key for part in call_plan.parts] == [(8, 4), (2, 4)]
    assert not plan(MODEL.entries[0], ((3,), (7, 8), (5,), (7,)), "pad").exact


# --- guards ----------------------------------------------------------------------------------------------------------


def test_a_size_below_a_rules_offset_is_no_size() -> None:
    for size, length in ((1, 0), (2, 1), (9, 8)):
        assert guards.call_sizes(signature([dimension("n", 1)], [spec("x", ("+", "n", 1))], []).entries[0], ((size,),)) == (length,)
    with raises("input-shape", match=r"input 'x', axis 0: expected n\+1, but no value of n gives 0"):
        guards.call_sizes(signature([dimension("n", 1)], [spec("x", ("+", "n", 1))], []).entries[0], ((0,),))
    with raises("input-shape", match="but no value of n gives 2"):
        guards.call_sizes(signature([dimension("n", 1)], [spec("x", ("+", ("*", "n", 3), 5))], []).entries[0], ((2,),))


def test_a_dimension_shows_where_an_input_first_has_it() -> None:
    assert guards.where_declared(MODEL.entries[0], "batch") == "input 'x', axis 0"
    assert guards.where_declared(MODEL.entries[0], "seq") == "input 'x', axis 1"
    assert guards.where_declared(MODEL.entries[0], "heads") == "heads"
    turned = edited(MODEL, inputs=MODEL.entries[0].inputs[::-1])
    assert guards.where_declared(turned.entries[0], "seq") == "input 'mask', axis 0"


def descriptors(*devices: int | None) -> list[Descriptor]:
    return [(0, (), "float32", None, device) for device in devices]


def test_inputs_lie_on_one_device() -> None:
    for device in (None, 0, 1):
        assert guards.common_device(MODEL.entries[0].inputs, descriptors(None, None, None, None), device) is None
    for device in (0, 1):
        assert guards.common_device(MODEL.entries[0].inputs, descriptors(device, device, device, device), device) == device


@pytest.mark.parametrize(
    ("devices", "device", "message"),
    [
        ((0, 0, 0, 0), None, "input 'scale': expected a tensor on the CPU, got one on device 0"),
        ((0, 0, 0, 0), 1, "input 'scale': expected a tensor on the CPU or CUDA device 1, got one on device 0"),
        ((1, 1, 0, 1), 1, "input 'mask': expected a tensor on the CPU or CUDA device 1, got one on device 0"),
        ((None, None, None, 2), None, "input 'first': expected a tensor on the CPU, got one on device 2"),
        ((None, 3, 0, None), 0, "input 'x': expected a tensor on the CPU or CUDA device 0, got one on device 3"),
        ((None, None, 0, 0), 0, "input 'mask': lies on another device than input 'scale'"),
        ((0, 0, 0, None), 0, "input 'first': lies on another device than input 'scale'"),
        ((0, None, 0, 0), 0, "input 'x': lies on another device than input 'scale'"),
    ],
)
def test_inputs_elsewhere_are_named(devices: tuple[int | None, ...], device: int | None, message: str) -> None:
    with raises("input-device") as caught:
        guards.common_device(MODEL.entries[0].inputs, descriptors(*devices), device)
    assert str(caught.value) == message
