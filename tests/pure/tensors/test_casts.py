"""Safe casts: the rule compared with NumPy's, and the resulting numbers of every library."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.format.schema import DTYPES, Alias
from cgbundle.tensors.library import library_of
from cgbundle.tensors.numbers import decode, encoded, is_safe
from cgbundle.tensors.tensor import DLPack, Tensor, from_bytes
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.fabricate import dimension, signature, spec
from tests.helpers.raising import raises
from tests.pure.program.test_program import program

SAFE = [(source, target) for source in DTYPES for target in DTYPES if source != target and is_safe(source, target)]
LOSSY = {(source, target) for source in ("int64", "uint64") for target in ("float64", "complex128")}
"""Casts that NumPy calls safe but that lose information."""

NUMPYS = [name for name in DTYPES if not name.startswith(("bfloat16", "float8"))]


@pytest.mark.parametrize("target", NUMPYS)
@pytest.mark.parametrize("source", NUMPYS)
def test_what_is_safe_is_what_numpy_says_but_for_what_loses_digits(source: str, target: str) -> None:
    numpy = pytest.importorskip("numpy")
    assert is_safe(source, target) == (numpy.can_cast(source, target, "safe") and (source, target) not in LOSSY)


@given(pair=st.sampled_from(SAFE), data=st.binary(min_size=16, max_size=16))
def test_a_safe_cast_keeps_every_number(pair: tuple[str, str], data: bytes) -> None:
    source, target = pair
    data = bytes([byte & 1 for byte in data]) if source == "bool" else data
    value = from_bytes(data, source, (16 // DTYPES[source],))
    converted = DLPack().cast(value, target)
    assert (converted.dtype, converted.shape) == (target, value.shape)
    assert str(converted.tolist()) == str(as_kind(value.tolist(), target))


def as_kind(numbers: list[Any], dtype: str) -> list[Any]:
    """Returns the numbers as Python writes those of `dtype`: 1.0 instead of 1 for a float."""
    kind = complex if dtype.startswith("complex") else float if "float" in dtype else bool if dtype == "bool" else int
    return [kind(number) for number in numbers]


@pytest.mark.parametrize("target", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
@pytest.mark.parametrize("source", DTYPES)
def test_what_is_refused_of_a_narrow_float_has_a_number_that_it_lacks(source: str, target: str) -> None:
    """The rule is not stricter than necessary. `target` has at most 65536 numbers, so all are compared."""
    if DTYPES[source] > 2 or source.startswith("complex"):
        assert not is_safe(source, target)
        return
    assert is_safe(source, target) == (numbers(source) <= numbers(target))


def numbers(dtype: str) -> set[float]:
    """Returns all numbers of a dtype of one or two bytes."""
    width = DTYPES[dtype]
    raw = bytes([0, 1]) if dtype == "bool" else b"".join(bits.to_bytes(width, "little") for bits in range(1 << 8 * width))
    return {float(number) for number in decode(dtype, raw) if number == number and abs(number) != float("inf")}


def test_nothing_of_a_gpu_is_cast_without_a_library() -> None:
    with raises("input-device", match="a DLPack tensor on a GPU is not cast"):
        DLPack().cast(Tensor(0, "int32", (2,), None, None, device=0), "int64")


# --- calls -----------------------------------------------------------------------------------------------------------

TOKENS = signature([dimension("batch", 2, 4)], [spec("ids", "batch", 2, dtype="int64"), spec("x", "batch")], [spec("y", "batch")])


def total(key: tuple[int, ...], inputs: list[list[Any]]) -> list[list[Any]]:
    ids, x = inputs
    return [[sum(ids[2 * row : 2 * row + 2]) + x[row] for row in range(key[0])]]


@pytest.mark.parametrize("library", ["plain", "numpy", "torch"])
@pytest.mark.parametrize("batch", [2, 3, 5])
def test_inputs_of_every_library_are_cast(library: str, batch: int) -> None:
    run, _ = program(TOKENS, total, cast=True)
    ids, x = list(range(2 * batch)), [index - 0.5 for index in range(batch)]
    (y,) = run(tensor(library, "int32", ids, (batch, 2)), tensor(library, "float16", x, (batch,)))
    assert library_of(y).name == {"plain": "dlpack"}.get(library, library)
    assert y.tolist() == [4 * row + 1 + row - 0.5 for row in range(batch)]


def tensor(library: str, dtype: str, numbers: list[Any], shape: tuple[int, ...]) -> Any:
    if library == "plain":
        return from_bytes(encoded(numbers, dtype), dtype, shape)
    module = pytest.importorskip(library)
    return module.asarray(numbers, dtype=getattr(module, dtype)).reshape(shape)


def test_an_array_that_is_laid_out_otherwise_is_cast_too() -> None:
    numpy = pytest.importorskip("numpy")
    run, _ = program(TOKENS, total, cast=True)
    (y,) = run(numpy.arange(4, dtype="int32").reshape(2, 2).T, numpy.zeros(4, "float16")[::2])
    assert y.tolist() == [2, 4]


def test_nothing_is_cast_unless_it_is_asked_for() -> None:
    run, _ = program(TOKENS, total)
    with raises("input-dtype", match="input 'ids': expected dtype int64, got int32") as caught:
        run(tensor("plain", "int32", [1] * 4, (2, 2)), tensor("plain", "float32", [0, 0], (2,)))
    assert caught.value.hint == "convert it to int64 before the call, or load the bundle with cast=True"


@pytest.mark.parametrize("asked", [False, True])
def test_what_may_lose_digits_is_never_cast(asked: bool) -> None:
    run, backend = program(TOKENS, total, cast=asked)
    with raises("input-dtype", match="input 'x': expected dtype float32, got float64") as caught:
        run(tensor("plain", "int64", [1] * 4, (2, 2)), tensor("plain", "float64", [0, 0], (2,)))
    assert "cast=True would not" in caught.value.hint and not backend.calls


def test_an_input_that_the_model_writes_to_is_never_cast() -> None:
    run, _ = program(edited(TOKENS, mutated_inputs=(1,)), total, cast=True)
    with raises("input-dtype", match="input 'x': expected dtype float32, got float16") as caught:
        run(tensor("plain", "int64", [1] * 4, (2, 2)), tensor("plain", "float16", [0, 0], (2,)))
    assert caught.value.hint == "convert it to float32 before the call: the model writes to it, so it is never cast"


def test_an_output_that_is_an_input_is_the_one_that_was_cast() -> None:
    numpy = pytest.importorskip("numpy")
    same = signature([dimension("n", 2)], [spec("x", "n")], [spec("y", "n")])
    run, _ = program(edited(same, aliases=(Alias(output=0, memory="inputs", index=0),)), lambda key, inputs: inputs, cast=True)
    array = numpy.ones(2, "float16")
    (y,) = run(array)
    assert y.dtype == "float32" and not numpy.shares_memory(y, array)
