"""Condensed tensors of a self-test: values within the bound pass, and those of a wrong program fail."""

from __future__ import annotations

from array import array
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.format.schema import DTYPES
from cgbundle.tensors import comparison
from cgbundle.tensors.comparison import difference

ROWS, COLUMNS = 24, 1024
"""The shape of a float32 tensor of one and a half blocks."""

EQUAL, NEAR = 0, 1


def kept(dtype: str, data: bytes, how: int) -> dict[str, bytes]:
    """Returns what replaces a tensor, by ending."""
    parts = {comparison.HASHES: comparison.block_hashes(data)}
    if how == NEAR:
        blocks = [data[begin : begin + comparison.BLOCK] for begin in range(0, len(data), comparison.BLOCK)]
        parts[comparison.SAMPLES] = comparison.taken(dtype, data)
        parts[comparison.STATISTICS] = b"".join([array("d", comparison.statistics(dtype, block)).tobytes() for block in blocks])
    return parts


def tensor(seed: float = 0.0) -> array[float]:
    return array("f", [((place * 7919) % 1013 - 506) / 100 + seed for place in range(ROWS * COLUMNS)])


def error_of(expected: array[float], got: array[float], how: int = NEAR) -> float:
    return comparison.compare("float32", kept("float32", expected.tobytes(), how), got.tobytes())[0]


@given(st.floats(1e-3, 0.5), st.integers(0, 1 << 16))
def test_an_error_is_never_larger_than_the_whole_tensors(size: float, salt: int) -> None:
    expected = tensor()
    got = array("f", [x + size * ((place * 31 + salt) % 17 - 8) / 8 for place, x in enumerate(expected)])
    whole = difference("float32", expected.tobytes(), got.tobytes())
    error = error_of(expected, got)
    assert error <= whole * (1 + 1e-9)
    assert error >= whole / 4  # every seventeenth element is wrong by that much, and a sixteenth of all elements are samples


def test_what_a_wrong_program_gives_is_noticed() -> None:
    expected = tensor()
    swapped = expected[COLUMNS : 2 * COLUMNS] + expected[:COLUMNS] + expected[2 * COLUMNS :]
    shifted = expected[1:] + expected[:1]
    last_row_missing = expected[:-COLUMNS] + array("f", [0.0] * COLUMNS)
    one_far_off = array("f", expected)
    one_far_off[12345] = 1000.0
    for got in (swapped, shifted, last_row_missing, one_far_off):
        assert error_of(expected, got) > 0.1
        assert error_of(expected, got, EQUAL) == inf
    for strange in (nan, inf, -inf):
        one_far_off[12345] = strange
        assert error_of(expected, one_far_off) == inf


def test_where_bits_are_promised_one_bit_is_noticed() -> None:
    data = tensor().tobytes()
    stored = kept("float32", data, EQUAL)
    assert comparison.compare("float32", stored, data) == (0.0, "")
    error, text = comparison.compare("float32", stored, data[:-1] + bytes([data[-1] ^ 1]))
    assert (error, text) == (inf, "1 of 2 blocks of 65536 bytes differ, first number 1")
    error, text = comparison.compare("int64", stored, bytes([data[0] ^ 1]) + data[1:])
    assert error == 0.5 and "first number 0" in text


def test_equal_values_with_other_bits_are_no_error_and_not_exact() -> None:
    zeros, negative = array("f", [0.0] * 100), array("f", [-0.0] * 100)
    error, text = comparison.compare("float32", kept("float32", zeros.tobytes(), NEAR), negative.tobytes())
    assert error == 0.0 and text


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("elements", [0, 1, 17, 40_000])
def test_shapes_are_those_of_what_is_kept(dtype: str, elements: int) -> None:
    data = bytes(elements * DTYPES[dtype])
    for how, shapes in enumerate(comparison.expected_shapes("x", dtype, elements)):
        parts = kept(dtype, data, how)
        assert {"x" + ending for ending in parts} == set(shapes)
        for ending, contents in parts.items():
            kind, shape = shapes["x" + ending]
            size = DTYPES[kind]
            for axis in shape:
                size *= axis
            assert len(contents) == size, (ending, shape)
        assert comparison.compare(dtype, parts, data) == (0.0, "")


@given(st.integers(1, 1 << 20))
def test_samples_are_elements_each_of_its_own_window(elements: int) -> None:
    last = comparison.sample_count(elements) - 1
    for sample in {0, last // 2, last}:
        place = comparison.place_of(sample, elements)
        assert sample * comparison.STEP <= place < min(elements, (sample + 1) * comparison.STEP)
