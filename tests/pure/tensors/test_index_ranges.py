"""The first index out of range explains a failed call, and nothing else does."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import pytest

from cgbundle.errors import CallError, CgbundleError, MachineError
from cgbundle.format.schema import TensorSpec
from cgbundle.tensors.input_errors import explained
from tests.helpers.bundles.fabricate import spec

FAULT = CallError("operation-refused", "host/model.so: index out of bounds: 0 <= tmp3 < 100L")
CODES = {"int64": "q", "int32": "i", "uint8": "B"}


def ids(low: int = 0, high: int = 100, dtype: str = "int64") -> TensorSpec:
    base = spec("ids", "batch", 3, dtype=dtype)
    return TensorSpec(name="ids", dtype=dtype, shape=base.shape, order=base.order, range=(low, high))


def asked(
    values: Sequence[int], shape: Sequence[int], strides: Sequence[int] | None = None, first: int = 0, *,
    of: TensorSpec | None = None, device: int | None = None, error: CgbundleError = FAULT, writes: bool = False,
) -> CgbundleError:  # fmt: skip
    row = of or ids()
    memory = array(CODES[row.dtype], values)
    address = memory.buffer_info()[0] + first * memory.itemsize
    descriptors = [(0, (1,), "float32", None, None), (address, shape, row.dtype, strides, device)]
    return explained(error, [spec("mask", "batch"), row], descriptors, writes=writes)


@pytest.mark.parametrize(
    ("values", "shape", "strides", "first", "text"),
    [
        ([1, 2, 3, 4, 5, 50300], (2, 3), None, 0, "value 50300 at [1, 2]"),
        ([1, 2, -1, 4, 500, 6], (2, 3), None, 0, "value -1 at [0, 2]"),
        ([1, 2, 3, 100], (2, 2), (1, 2), 0, "value 100 at [1, 1]"),
        ([7, 0, 0, 0, 300, 0], (2,), (4,), 0, "value 300 at [1]"),
        ([0, 9, 0, 300, 0], (3,), (-2,), 4, None),
        ([0, 9, 300, 9, 0], (3,), (-2,), 4, "value 300 at [1]"),
        ([200], (3, 4), (0, 0), 0, "value 200 at [0, 0]"),
        ([101], (), None, 0, "value 101 at []"),
        ([0, 99, 0], (3,), None, 0, None),
        ([], (0, 3), None, 0, None),
    ],
)
def test_the_first_index_out_of_range_is_named(
    values: list[int], shape: tuple[int, ...], strides: tuple[int, ...] | None, first: int, text: str | None
) -> None:
    error = asked(values, shape, strides, first)
    if text is None:
        assert error is FAULT
    else:
        assert (error.code, str(error)) == ("input-value", f"input 'ids': {text} is outside 0..99")


def test_other_dtypes_and_ranges() -> None:
    assert str(asked([5, 255], (2,), of=ids(0, 200, "uint8"))) == "input 'ids': value 255 at [1] is outside 0..199"
    assert str(asked([-8, 0], (2,), of=ids(-7, 7, "int32"))) == "input 'ids': value -8 at [0] is outside -7..6"
    assert str(asked([0, 7], (2,), of=ids(-7, 7, "int32"))) == "input 'ids': value 7 at [1] is outside -7..6"


def test_what_it_cannot_be_stays_as_it_is() -> None:
    assert asked([500], (1,), device=0) is FAULT, "memory of a GPU is not read"
    assert asked([500], (1,), of=spec("ids", "batch", dtype="int64")) is FAULT, "no range is known"
    closed = MachineError("library-missing", "no torch")
    assert asked([500], (1,), error=closed) is closed


def test_a_call_that_writes_to_state_says_what_became_of_it() -> None:
    known, unknown, closed = (
        asked([100], (1,), writes=True),
        asked([5], (1,), writes=True),
        MachineError("library-missing", "no torch"),
    )
    assert known.code == "input-value" and known.hint.endswith("reset() brings back what it held at first")
    assert (unknown.code, str(unknown)) == (FAULT.code, str(FAULT)) and "may hold a part of it" in unknown.hint
    assert asked([500], (1,), error=closed, writes=True) is closed


def test_a_large_input_is_searched_in_a_moment() -> None:
    memory = (ctypes.c_int64 * 1_000_000)()
    memory[999_999] = 100
    error = explained(FAULT, [ids()], [(ctypes.addressof(memory), (1000, 1000), "int64", None, None)], writes=False)
    assert str(error) == "input 'ids': value 100 at [999, 999] is outside 0..99"
