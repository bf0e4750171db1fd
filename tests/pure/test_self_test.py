"""The stored self-test: how errors are measured, what passes, and what a damaged one reports."""

from __future__ import annotations

import math
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle import self_test
from cgbundle.format import file_names, safetensors_files
from cgbundle.format.schema import DTYPES, Manifest
from cgbundle.program import Program
from cgbundle.self_test import Compared, Result
from cgbundle.tensors import comparison
from cgbundle.tensors.comparison import describe, difference, nearest
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.fabricate import FakeBackend, Numbers, kept_self_test
from tests.helpers.bundles.tiny_bundle import manifest
from tests.helpers.bundles.tiny_bundle import self_test_tensors as self_test_tensors_files
from tests.helpers.raising import raises

INFINITY, NAN = float("inf"), float("nan")
doubles = st.lists(st.floats(width=64), min_size=1, max_size=6)
finite = st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=6)


def pack(numbers: list[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}d", *numbers)


def error(expected: list[float], got: list[float]) -> float:
    return difference("float64", pack(expected), pack(got))


# --- difference ------------------------------------------------------------------------------------------------------


@given(doubles)
def test_equal_numbers_have_no_error_whatever_they_are(numbers: list[float]) -> None:
    assert error(numbers, numbers) == 0


@given(doubles, doubles)
def test_the_error_is_a_number_from_0_to_infinity(expected: list[float], got: list[float]) -> None:
    measured_error = error(expected, (got * 6)[: len(expected)])
    assert measured_error >= 0


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
    assert difference(dtype, zeros, zeros) == 0
    assert 0 < difference(dtype, zeros, ones) < INFINITY


@pytest.mark.parametrize("dtype", [dtype for dtype in sorted(DTYPES) if "int" in dtype or dtype == "bool"])
def test_the_error_of_integers_is_the_share_that_differs(dtype: str) -> None:
    """Relative to the largest element, a difference of one at 2**63 - 1 would vanish, and 17 instead of 12 would pass at 4 %."""
    width = DTYPES[dtype]
    expected = b"".join(bytes([1]) + b"\xff" * (width - 1) for _ in range(4)) if width > 1 else bytes([0, 1, 0, 1])
    got = bytes([expected[0] ^ 1]) + expected[1:]
    assert difference(dtype, expected, got) == 0.25


@pytest.mark.parametrize(
    ("dtype", "numbers", "bad"),
    [("float8_e5m2", b"\x3c\x7c", b"\x3c\xfc"), ("float8_e5m2", b"\x3c\x7c", b"\x3c\x7f"),
     ("float8_e4m3fn", b"\x38\x7f", b"\x38\x38"),
     ("bfloat16", b"\x80\x3f\x80\x7f", b"\x80\x3f\x80\xff"), ("float16", b"\x00\x3c\x00\x7c", b"\x00\x3c\x00\x7e"),
     ("complex64", struct.pack("<2f", 1, INFINITY), struct.pack("<2f", 1, -INFINITY)),
     ("complex128", struct.pack("<2d", NAN, 1), struct.pack("<2d", 1, NAN))],
)  # fmt: skip
def test_nan_and_infinity_stand_where_they_stood_in_every_dtype(dtype: str, numbers: bytes, bad: bytes) -> None:
    assert difference(dtype, numbers, numbers) == 0
    assert difference(dtype, numbers, bad) == difference(dtype, bad, numbers) == INFINITY


@pytest.mark.parametrize(
    ("dtype", "shape", "expected", "got", "text"),
    [
        ("int64", (8,), [12] * 8, [12, 12, 17, 3, 12, 12, 12, 0], "3 of 8 values differ, first at [2]: 17, expected 12"),
        ("int64", (2, 3), [0] * 6, [0, 0, 0, 0, -1, 0], "1 of 6 values differ, first at [1, 1]: -1, expected 0"),
        ("int64", (), [5], [6], "1 of 1 values differ, first: 6, expected 5"),
        ("float64", (2, 2), [1.0, 2.0, 3.0, 4.0], [1.5, 2.0, 3.0, 6.25],
         "2 of 4 values differ, furthest off at [1, 1]: 6.25, expected 4"),
        ("float64", (2,), [1.0, NAN], [2.0, 1.0], "2 of 2 values differ, furthest off at [1]: 1, expected nan"),
        ("float64", (2,), [1.0, 0.0], [1.0, -0.0], "equal values, other bits"),
        ("complex128", (2,), [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 5.0], "1 of 4 parts differ, furthest off at [1]: 5, expected 4"),
        ("int64", (2,), [1, 2], [1], "8 bytes, expected 16"),
    ],
)  # fmt: skip
def test_what_differs_is_said_for_people(
    dtype: str, shape: tuple[int, ...], expected: list[Any], got: list[Any], text: str
) -> None:
    code = "q" if dtype == "int64" else "d"
    packed = [struct.pack(f"<{len(values)}{code}", *values) for values in (expected, got)]
    assert describe(dtype, shape, *packed) == text


@given(st.sampled_from(sorted(DTYPES)), st.binary(max_size=96), st.data())
def test_blocks_give_the_difference_of_the_whole_tensor(dtype: str, data: bytes, more: st.DataObject) -> None:
    """This holds for blocks of any size, and for equal, zero and different blocks."""
    expected = bytes(more.draw(st.integers(0, 3)) * 16) + data[: len(data) // 16 * 16]
    got = bytearray(expected)
    for place in more.draw(st.lists(st.integers(0, max(0, len(got) - 1)), max_size=4 if got else 0)):
        got[place] = more.draw(st.integers(0, 255))
    comparisons = []
    for block in (16, 48, 1 << 16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comparison, "BLOCK", block)
            comparisons.append((repr(difference(dtype, expected, bytes(got))), describe(dtype, (len(got),), expected, bytes(got))))
    assert comparisons[0] == comparisons[1] == comparisons[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_a_large_cache_is_compared_in_little_memory(dtype: str) -> None:
    expected = bytearray(32 << 20)
    expected[5_000_000:5_000_004] = b"\x00\x00\x80\x3f"
    got = bytearray(expected)
    got[20_000_000:20_000_004] = b"\x00\x00\x80\x3e"
    one, other = bytes(expected), bytes(got)
    tracemalloc.start()
    try:
        error, said = difference(dtype, one, other), describe(dtype, (1 << 23,), one, other)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 << 20
    assert (error == 0.25) == (dtype != "int64") and "differ" in said


def test_the_nearest_to_its_bound_speaks_for_all() -> None:
    assert nearest([]) == (0.0, 0.0)
    assert nearest([(1e-5, 1e-4), (1e-2, 4e-2), (0.0, 0.0)]) == (1e-2, 4e-2)
    assert nearest([(0.0, 0.0), (0.0, 1e-4)]) == (0.0, 1e-4)
    assert nearest([(0.125, 0.0), (1e-2, 4e-2)]) == (0.125, 0.0), "nothing is further beyond than an integer that differs"


@pytest.mark.parametrize(
    ("compare", "exact", "measured_error", "passed"),
    [("bits", True, 0.0, True), ("bits", False, 0.0, False), ("tolerance", False, 0.1, True), ("tolerance", False, 0.11, False),
     ("tolerance", False, NAN, False), ("tolerance", False, INFINITY, False)],
)  # fmt: skip
def test_a_result_passes_by_bits_or_by_tolerance(compare: str, exact: bool, measured_error: float, passed: bool) -> None:
    fine = Compared(title="output a (float32)", error=0.0, bound=0.1, exact=True, text="")
    tensor = Compared(title="output b (float32)", error=measured_error, bound=0.1, exact=exact, text="")
    result = Result(entry="forward", key=(1,), tensors=(fine, tensor))
    assert result.passed(compare) is passed and result.exact is exact
    assert [tensor["passed"] for tensor in result.plain(compare)["tensors"]] == [True, passed]


# --- runs of the self-test -------------------------------------------------------------------------------------------


def first_two(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
    """Returns what the self-test of the fabricated bundle expects: outputs that count from 0."""
    return [[float(number) for number in range(2 * key[0])]]


def off_by_half(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
    return [[number + (0.5 if key == (4,) else 0.0) for number in first_two(key, inputs)[0]]]


def bundle(tmp_path: Path, drop: str = "") -> str:
    tensors = {name: value for name, value in self_test_tensors_files().items() if name != drop}
    with open(tmp_path / file_names.SELF_TEST, "wb") as file:
        safetensors_files.write(file, tensors)
    return str(tmp_path)


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_a_self_test_that_holds_is_exact(tmp_path: Path, outputs: str) -> None:
    backend = FakeBackend(manifest(), first_two)
    results = self_test.replay_self_test(Program(manifest(), backend, "pad", outputs, self_test=kept_self_test(bundle(tmp_path))))
    assert [(result.key, result.error, result.exact) for result in results] == [((1,), 0.0, True), ((4,), 0.0, True)]
    assert [values for _, (values,) in backend.calls] == [[0.0, 1.0, 2.0], [float(number) for number in range(12)]]


def token_and_logits(base: Manifest) -> Manifest:
    """Returns the fabricated bundle with bfloat16's bound. Its second output is an int64 that depends on the first one."""
    specs = (
        base.entries[0].outputs[0],
        replace(base.entries[0].outputs[0], name="token", dtype="int64", shape=("batch",), order=(0,)),
    )
    value = base.entries[0].programs[0].values[1]
    programs = [
        replace(
            program, values=(*program.values, replace(value, dtype="int64", shape=program.key, strides=(1,))), outputs=(1, 2),
            steps=(replace(program.steps[0], outputs=(1, 2)),),
        )
        for program in base.entries[0].programs
    ]  # fmt: skip
    token_self_test = replace(
        base.entries[0].self_test,
        bounds=(4e-2, 0.0),
        proofs=tuple([replace(proof, tolerance=4e-2) for proof in base.entries[0].self_test.proofs]),
    )
    result = {"tuple": [{"tensor": 0}, {"tensor": 1}]}
    return edited(base, outputs=specs, programs=tuple(programs), result=result, self_test=token_self_test)


def test_an_integer_is_not_judged_by_the_bound_of_the_floats_beside_it(tmp_path: Path) -> None:
    """17 instead of 1000 is within 4 % of the largest number of a vocabulary."""
    fabricated = token_and_logits(manifest())
    tokens = {size: [1000 + row for row in range(size)] for (size,) in [program.key for program in fabricated.entries[0].programs]}
    tensors = self_test_tensors_of(tokens)
    with open(tmp_path / file_names.SELF_TEST, "wb") as file:
        safetensors_files.write(file, tensors)

    def replayed(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
        near = [number * 1.01 for number in first_two(key, inputs)[0]]
        return [near, [number + (17 if number == 1002 else 0) for number in tokens[key[0]]]]

    program = Program(fabricated, FakeBackend(fabricated, replayed), "pad", "copy", self_test=kept_self_test(str(tmp_path)))
    one, four = self_test.replay_self_test(program)
    assert one.passed("tolerance") and 0 < one.error < 4e-2
    assert not four.passed("tolerance")
    assert [tensor.title for tensor in four.tensors] == ["output y (float32)", "output token (int64)"]
    assert [tensor.text for tensor in four.tensors] == ["", "1 of 4 values differ, first at [2]: 1019, expected 1002"]
    assert [tensor.passed("tolerance") for tensor in four.tensors] == [True, False]


def self_test_tensors_of(tokens: dict[int, list[int]]) -> dict[str, safetensors_files.Tensor]:
    tensors = self_test_tensors_files()
    for size, numbers in tokens.items():
        data = struct.pack(f"<{size}q", *numbers)
        tensors[file_names.self_test_entry((size,), "output", 1)] = ("int64", (size,), lambda data=data: data)
    return tensors


@pytest.mark.parametrize(("compare", "passed"), [("tolerance", [True, False]), ("bits", [True, False])])
def test_a_self_test_that_fails_says_which_key_and_by_how_much(tmp_path: Path, compare: str, passed: list[bool]) -> None:
    fabricated = edited(manifest(), self_test=replace(manifest().entries[0].self_test, compare=compare))
    program = Program(fabricated, FakeBackend(fabricated, off_by_half), "pad", "copy", self_test=kept_self_test(bundle(tmp_path)))
    results = self_test.replay_self_test(program)
    assert [result.exact for result in results] == [True, False]
    assert [result.passed(compare) for result in results] == passed
    assert f"{results[1].error:.1e}" == "7.1e-02" and results[1].tolerance == 1e-5


def test_a_part_of_the_self_test_can_be_replayed(tmp_path: Path) -> None:
    program = Program(manifest(), FakeBackend(manifest(), first_two), "pad", "copy", self_test=kept_self_test(bundle(tmp_path)))
    assert [result.key for result in self_test.replay_self_test(program, keys=[(4,)])] == [(4,)]


@pytest.mark.parametrize("drop", ["4/input/0", "4/output/0"])
def test_a_self_test_that_lacks_a_tensor_is_damaged(tmp_path: Path, drop: str) -> None:
    program = Program(
        manifest(), FakeBackend(manifest(), first_two), "pad", "copy", self_test=kept_self_test(bundle(tmp_path, drop))
    )
    with raises("weights-invalid", match=rf"^exam\.safetensors: tensor '{drop}' is missing"):
        self_test.replay_self_test(program)


@pytest.mark.parametrize(("key", "name"), [((), "-/input/3"), ((8,), "8/input/3"), ((8, 128), "8x128/input/3")])
def test_the_names_of_self_test_tensors(key: tuple[int, ...], name: str) -> None:
    assert file_names.self_test_entry(key, "input", 3) == name


def test_a_key_is_named_with_its_dimensions() -> None:
    assert self_test.name_key(manifest().entries[0], (8,)) == "batch=8"
    assert self_test.name_key(replace(manifest().entries[0], dimensions=()), ()) == "()"
