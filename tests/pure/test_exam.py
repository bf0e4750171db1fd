"""The stored exam: how errors are measured, what passes, and what a damaged exam says."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle import exam
from cgbundle.exam import Result, relative_error
from cgbundle.format import archive, safetensors
from cgbundle.format.schema import DTYPES
from cgbundle.program import Program
from tests.helpers.fabricate import FakeBackend, Numbers
from tests.helpers.raising import raises
from tests.helpers.support import exam_tensors, manifest

INFINITY, NAN = float("inf"), float("nan")
doubles = st.lists(st.floats(width=64), min_size=1, max_size=6)
finite = st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=6)


def pack(numbers: list[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}d", *numbers)


def error(expected: list[float], got: list[float]) -> float:
    return relative_error("float64", pack(expected), pack(got))


# --- relative_error --------------------------------------------------------------------------------------------------


@given(doubles)
def test_equal_numbers_have_no_error_whatever_they_are(numbers: list[float]) -> None:
    assert error(numbers, numbers) == 0


@given(doubles, doubles)
def test_the_error_is_a_number_from_0_to_infinity(expected: list[float], got: list[float]) -> None:
    found = error(expected, (got * 6)[: len(expected)])
    assert found >= 0


@given(finite, st.floats(-1e100, 1e100), st.data())
def test_the_error_is_the_largest_difference_by_the_largest_number(
    expected: list[float], other: float, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(expected) - 1))
    got = [*expected[:place], other, *expected[place + 1 :]]
    largest = max(map(abs, expected)) or 1.0
    assert math.isclose(error(expected, got), abs(other - expected[place]) / largest, rel_tol=1e-12)


@given(st.lists(st.integers(-1000, 1000).filter(bool).map(float), min_size=1, max_size=6), st.integers(-8, 8))
def test_the_error_does_not_change_with_the_scale(expected: list[float], power: int) -> None:
    got = [number + 0.25 for number in expected]
    scaled = error([number * 2.0**power for number in expected], [number * 2.0**power for number in got])
    assert scaled == error(expected, got)


@given(finite, st.sampled_from([INFINITY, -INFINITY, NAN]), st.data())
def test_a_number_that_is_not_finite_where_another_was_is_infinitely_wrong(
    expected: list[float], bad: float, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(expected) - 1))
    got = [*expected[:place], bad, *expected[place + 1 :]]
    assert error(expected, got) == INFINITY
    assert error(got, expected) == INFINITY


def test_infinities_of_both_signs_and_nan_differ() -> None:
    for one, other in ((INFINITY, -INFINITY), (INFINITY, NAN), (NAN, INFINITY)):
        assert error([one, 1.0], [other, 1.0]) == INFINITY
    assert error([INFINITY, NAN, 1.0], [INFINITY, NAN, 1.5]) == 0.5


def test_zeros_of_both_signs_are_equal_and_over_zeros_the_error_is_absolute() -> None:
    assert error([0.0], [-0.0]) == 0
    assert error([0.0, 0.0], [0.0, 0.25]) == 0.25


def test_outputs_of_another_length_are_infinitely_wrong() -> None:
    assert error([1.0], [1.0, 1.0]) == INFINITY


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_can_be_compared(dtype: str) -> None:
    zeros, ones = bytes(2 * DTYPES[dtype]), bytes([1] * DTYPES[dtype]) + bytes(DTYPES[dtype])
    assert relative_error(dtype, zeros, zeros) == 0
    assert 0 < relative_error(dtype, zeros, ones) < INFINITY


def test_integers_are_compared_exactly() -> None:
    big = 2**63 - 1
    assert relative_error("int64", struct.pack("<q", big), struct.pack("<q", big - 1)) == 1 / big
    assert relative_error("uint8", b"\x00\x04", b"\x02\x04") == 0.5


@pytest.mark.parametrize(
    ("compare", "exact", "found", "passed"),
    [("bits", True, 0.0, True), ("bits", False, 0.0, False), ("tolerance", False, 0.1, True), ("tolerance", False, 0.11, False),
     ("tolerance", False, NAN, False), ("tolerance", False, INFINITY, False)],
)  # fmt: skip
def test_a_result_passes_by_bits_or_by_tolerance(compare: str, exact: bool, found: float, passed: bool) -> None:
    assert Result(key=(1,), error=found, tolerance=0.1, exact=exact).passed(compare) is passed


# --- sitting ---------------------------------------------------------------------------------------------------------


def first_two(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
    """What the exam of the fabricated bundle expects: its outputs count from 0."""
    return [[float(number) for number in range(2 * key[0])]]


def off_by_half(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
    return [[number + (0.5 if key == (4,) else 0.0) for number in first_two(key, inputs)[0]]]


def bundle(tmp_path: Path, drop: str = "") -> str:
    tensors = {name: value for name, value in exam_tensors().items() if name != drop}
    with open(tmp_path / archive.EXAM, "wb") as file:
        safetensors.write(file, tensors)
    return str(tmp_path)


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_an_exam_that_holds_is_exact(tmp_path: Path, outputs: str) -> None:
    backend = FakeBackend(manifest(), first_two)
    results = exam.replay_exam(bundle(tmp_path), Program(manifest(), backend, "pad", outputs))
    assert [(result.key, result.error, result.exact) for result in results] == [((1,), 0.0, True), ((4,), 0.0, True)]
    assert [given for _, (given,) in backend.calls] == [[0.0, 1.0, 2.0], [float(number) for number in range(12)]]


@pytest.mark.parametrize(("compare", "passed"), [("tolerance", [True, False]), ("bits", [True, False])])
def test_an_exam_that_fails_says_which_key_and_by_how_much(tmp_path: Path, compare: str, passed: list[bool]) -> None:
    made = replace(manifest(), exam=replace(manifest().exam, compare=compare))
    results = exam.replay_exam(bundle(tmp_path), Program(made, FakeBackend(made, off_by_half), "pad", "copy"))
    assert [result.exact for result in results] == [True, False]
    assert [result.passed(compare) for result in results] == passed
    assert f"{results[1].error:.1e}" == "7.1e-02" and results[1].tolerance == 1e-5


def test_a_part_of_the_exam_can_be_replayed(tmp_path: Path) -> None:
    program = Program(manifest(), FakeBackend(manifest(), first_two), "pad", "copy")
    assert [result.key for result in exam.replay_exam(bundle(tmp_path), program, keys=[(4,)])] == [(4,)]


@pytest.mark.parametrize("drop", ["4/input/0", "4/output/0"])
def test_an_exam_that_lacks_a_tensor_is_damaged(tmp_path: Path, drop: str) -> None:
    program = Program(manifest(), FakeBackend(manifest(), first_two), "pad", "copy")
    with raises("weights-invalid", match=rf"^exam\.safetensors: tensor '{drop}' is missing"):
        exam.replay_exam(bundle(tmp_path, drop), program)


@pytest.mark.parametrize(("key", "name"), [((), "-/input/3"), ((8,), "8/input/3"), ((8, 128), "8x128/input/3")])
def test_the_names_of_exam_tensors(key: tuple[int, ...], name: str) -> None:
    assert archive.exam_entry(key, "input", 3) == name


def test_a_key_is_named_with_its_dimensions() -> None:
    assert exam.name_key(manifest(), (8,)) == "batch=8"
    assert exam.name_key(replace(manifest(), dimensions=()), ()) == "()"
