"""Guards and plans: the shapes of a call select what runs, or give an error with the input, the axis, the expected and the actual
size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.call import plan as guards
from cgbundle.call import plan as plans
from cgbundle.errors import CallError
from cgbundle.tensors import input_errors
from tests.helpers.bundles.fabricate import dimension, signature, spec
from tests.helpers.raising import raises

MODEL = signature(
    [dimension("batch", 1, 8), dimension("seq", 32, 128)],
    [spec("ids", "batch", "seq", dtype="int64"), spec("mask", "batch", ("+", ("*", "seq", 2), 1)), spec("scale")],
    [spec("logits", "batch", "seq", 10)],
)
GOOD = ((8, 32), (8, 65), ())


def refused(shapes: tuple[tuple[int, ...], ...], kind: type[CallError]) -> str:
    with raises(kind) as caught:
        guards.call_sizes(MODEL.entries[0], shapes)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sizes_come_in_declared_order() -> None:
    assert guards.call_sizes(MODEL.entries[0], GOOD) == (8, 32)


@given(st.integers(0, 500), st.integers(0, 500))
def test_any_sizes_that_agree_are_found(batch: int, seq: int) -> None:
    assert guards.call_sizes(MODEL.entries[0], ((batch, seq), (batch, 2 * seq + 1), ())) == (batch, seq)


def test_a_rank_names_the_input_and_both_ranks() -> None:
    assert refused(((8,), (8, 65), ()), "input-shape") == "input 'ids': expected 2 axes [batch, seq], got 1: [8]"
    assert refused(((8, 32), (8, 65), (1,)), "input-shape") == "input 'scale': expected 0 axes [], got 1: [1]"


def test_a_fixed_axis_names_the_axis_and_both_sizes() -> None:
    model = signature([], [spec("x", 3, 64)], [spec("y", 3)])
    with raises("input-shape", match=r"^input 'x', axis 1: expected 64, got 63; the input is \[3, 64\]$"):
        guards.call_sizes(model.entries[0], ((3, 63),))


def test_a_size_that_no_dimension_gives_names_the_rule_and_the_size() -> None:
    assert refused(((8, 32), (8, 64), ()), "input-shape") == "input 'mask', axis 1: expected 2*seq+1, but no value of seq gives 64"
    assert refused(((8, 32), (8, 0), ()), "input-shape") == "input 'mask', axis 1: expected 2*seq+1, but no value of seq gives 0"


def test_inputs_that_disagree_name_both_and_both_sizes() -> None:
    message = refused(((8, 32), (7, 65), ()), "dimension-disagrees")
    assert message == "input 'mask', axis 0: expected batch=8 as in input 'ids', axis 0, got 7"
    message = refused(((8, 32), (8, 67), ()), "dimension-disagrees")
    assert message == "input 'mask', axis 1: expected seq=32 as in input 'ids', axis 1, got 33"


def test_two_axes_of_one_input_may_disagree_too() -> None:
    model = signature([dimension("n", 4)], [spec("x", "n", "n")], [spec("y", "n")])
    with raises("dimension-disagrees", match=r"input 'x', axis 1: expected n=4 as in input 'x', axis 0, got 5") as caught:
        guards.call_sizes(model.entries[0], ((4, 5),))
    assert getattr(caught.value, "hint", "") == "the axes of 'x' that are n have to be equal"


def test_a_dtype_names_both_and_what_to_do() -> None:
    error = input_errors.wrong_dtype(MODEL.entries[0].inputs[0], "float32", written=False)
    assert (error.code, str(error)) == ("input-dtype", "input 'ids': expected dtype int64, got float32")
    assert error.hint.startswith("convert it to int64 before the call")


# --- plans -----------------------------------------------------------------------------------------------------------


def test_an_exact_call_is_one_part_over_whole_tensors() -> None:
    call_plan = plans.plan(MODEL.entries[0], GOOD, "pad")
    assert call_plan.exact and call_plan.shapes == ((8, 32, 10),)
    (part,) = call_plan.parts
    assert MODEL.entries[0].programs[part.program].key == (8, 32)


def test_a_padded_call_gives_slices_of_the_call_and_recorded_shapes() -> None:
    call_plan = plans.plan(MODEL.entries[0], ((5, 50), (5, 101), ()), "pad")
    assert not call_plan.exact and call_plan.shapes == ((5, 50, 10),)
    (part,) = call_plan.parts
    assert MODEL.entries[0].programs[part.program].key == (8, 128)
    assert part.inputs == (
        ((slice(0, 5), slice(0, 50)), (8, 128)),
        ((slice(0, 5), slice(0, 101)), (8, 257)),
        ((), ()),
    )
    taken = placed = (slice(0, 5), slice(0, 50), slice(0, 10))
    assert part.outputs == ((taken, placed),)


def test_a_cut_call_gives_each_part_its_place() -> None:
    model = signature([dimension("batch", 2)], [spec("x", ("*", "batch", 3))], [spec("y", ("*", 2, "batch"), 4)])
    call_plan = plans.plan(model.entries[0], ((15,),), "pad")
    assert [part.inputs for part in call_plan.parts] == [
        (((slice(0, 6),), (6,)),),
        (((slice(6, 12),), (6,)),),
        (((slice(12, 15),), (6,)),),
    ]
    assert [part.outputs for part in call_plan.parts] == [
        (((slice(0, 4), slice(0, 4)), (slice(0, 4), slice(0, 4))),),
        (((slice(0, 4), slice(0, 4)), (slice(4, 8), slice(0, 4))),),
        (((slice(0, 2), slice(0, 4)), (slice(8, 10), slice(0, 4))),),
    ]
    assert call_plan.shapes == ((10, 4),)


@given(st.integers(1, 40), st.integers(1, 300), st.sampled_from(["pad", "chunk"]))
def test_the_parts_of_a_plan_fill_every_output_once(batch: int, seq: int, on_miss: str) -> None:
    call_plan = plans.plan(MODEL.entries[0], ((batch, seq), (batch, 2 * seq + 1), ()), on_miss)
    covered = [
        (row, column)
        for part in call_plan.parts
        for row in range(*part.outputs[0][1][0].indices(batch))
        for column in range(*part.outputs[0][1][1].indices(seq))
    ]
    assert len(covered) == len(set(covered)) == batch * seq
    for part in call_plan.parts:
        taken, placed = part.outputs[0]
        assert [interval.stop - interval.start for interval in taken] == [interval.stop - interval.start for interval in placed]


def test_a_plan_refuses_what_dispatch_and_guards_refuse() -> None:
    with raises("key-missing"):
        plans.plan(MODEL.entries[0], ((5, 32), (5, 65), ()), "error")
    with raises("dimension-disagrees"):
        plans.plan(MODEL.entries[0], ((5, 32), (6, 65), ()), "pad")


def test_the_hint_of_an_input_that_calls_write_to_is_another_one() -> None:
    spec = MODEL.entries[0].inputs[0]
    written, read = [input_errors.wrong_dtype(spec, "int8", written=written).hint for written in (True, False)]
    assert written.endswith("before the call: the model writes to it, so it is never cast") and "never cast" not in read


@pytest.mark.parametrize(
    ("dtype", "make"),
    [
        ("float32", "numpy.asarray(value, dtype='float32')"), ("int64", "numpy.asarray(value, dtype='int64')"),
        ("bfloat16", "torch.tensor(value, dtype=torch.bfloat16)"), ("float8_e5m2", "torch.tensor(value, dtype=torch.float8_e5m2)"),
    ],
)  # fmt: skip
def test_numbers_become_a_tensor_of_a_library_that_has_the_dtype(dtype: str, make: str) -> None:
    spec = replace(MODEL.entries[0].inputs[0], dtype=dtype)
    assert input_errors.unreadable(CallError("input-kind", "no"), spec, [1, 2], "numpy").hint == f"make a tensor of it: {make}"


def test_tensors_in_a_container_are_passed_one_by_one() -> None:
    tensor = memoryview(bytes(4))  # an object with a shape counts as a tensor
    for value, call in (([1, tensor], "program(*inputs)"), ((tensor,), "program(*inputs)"), ({"x": tensor}, "program(**inputs)")):
        hint = input_errors.unreadable(CallError("input-kind", "no"), MODEL.entries[0].inputs[0], value, "numpy").hint
        assert hint == f"every input is an argument of its own: {call}"
    assert input_errors.unreadable(CallError("input-kind", "no", "why"), MODEL.entries[0].inputs[0], "text", "numpy").hint == "why"
