"""Tensors without a library, and DLPack in both directions: values, layouts, and memory ownership."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import weakref
from array import array
from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.format.schema import DTYPES
from cgbundle.format.shapes import dense, is_dense
from cgbundle.tensors import capsules, library, tensor
from cgbundle.tensors.tensor import Tensor
from tests.helpers.places import ROOT
from tests.helpers.raising import raises


class Owner:
    """Memory that counts how often it was released."""

    def __init__(self, size: int) -> None:
        self.memory = (ctypes.c_char * max(1, size))()


def owned(shape: tuple[int, ...], dtype: str = "float32") -> tuple[Tensor, weakref.ref[Owner]]:
    owner = Owner(prod(shape) * DTYPES[dtype])
    source = Tensor(ctypes.addressof(owner.memory), dtype, shape, None, owner)
    return source, weakref.ref(owner)


def read(value: Any, name: str) -> Tensor:
    return Tensor(*capsules.read(value, name))


# --- the tensor itself -----------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(shapes, st.permutations(range(4)))
def test_dense_strides_leave_no_gap_in_any_order(shape: tuple[int, ...], places: list[int]) -> None:
    order = [axis for axis in places if axis < len(shape)]
    strides = dense(shape, order)
    assert is_dense(shape, strides, order)
    if 0 not in shape:
        assert sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) == prod(shape) - 1
        assert [shape[axis] for axis in order] == [
            shape[axis] for axis in sorted(order, key=lambda a: (-strides[a], order.index(a)))
        ]


def test_a_tensor_of_zeros_is_zeros() -> None:
    assert tensor.empty("float32", (2, 3)).tolist() == [[0.0] * 3] * 2
    assert tensor.empty("int64", (0, 3)).tolist() == []
    assert tensor.empty("int64", ()).tolist() == 0


@pytest.mark.parametrize("length", [0, 23, 25])
def test_bytes_of_another_length_make_no_tensor(length: int) -> None:
    with pytest.raises(ValueError, match=rf"{length} bytes do not make float32 \[2, 3\]"):
        tensor.from_bytes(bytes(length), "float32", (2, 3))


def test_bytes_are_copied() -> None:
    data = bytearray(b"abcd")
    copied = tensor.from_bytes(data, "uint8", (4,))
    data[0] = 0
    assert copied.tobytes() == b"abcd"


@pytest.mark.parametrize(
    ("dtype", "data", "numbers"),
    [
        ("bool", b"\0\1\1", [False, True, True]),
        ("int8", b"\xff\x01\x80", [-1, 1, -128]),
        ("uint16", b"\x01\x02\xff\xff", [513, 65535]),
        ("int64", b"\xff" * 8, [-1]),
        ("float16", b"\x00\x3c\x00\xfc", [1.0, float("-inf")]),
        ("bfloat16", b"\x80\x3f\x80\xff", [1.0, float("-inf")]),
        ("float32", b"\x00\x00\x80\x3f", [1.0]),
        ("float64", b"\0" * 6 + b"\xf0\x3f", [1.0]),
        ("complex64", b"\x00\x00\x80\x3f\x00\x00\x00\x40" * 2, [1 + 2j, 1 + 2j]),
        ("float8_e5m2", b"\x3c\x7c\xbc\x01", [1.0, float("inf"), -1.0, 2.0**-16]),
        ("float8_e4m3fn", b"\x38\x7e\xb8\x01\x00", [1.0, 448.0, -1.0, 2.0**-9, 0.0]),
    ],
)
def test_every_dtype_has_python_numbers(dtype: str, data: bytes, numbers: list[Any]) -> None:
    assert tensor.from_bytes(data, dtype, (len(numbers),)).tolist() == numbers


def test_float8_without_infinity_has_nan() -> None:
    for byte in (b"\x7f", b"\xff"):
        (number,) = tensor.from_bytes(byte, "float8_e4m3fn", (1,)).tolist()
        assert number != number


def test_every_dtype_of_the_schema_can_be_read() -> None:
    for dtype in DTYPES:
        assert tensor.empty(dtype, (2,)).tolist() == [0, 0]


def test_complex_numbers_nest_as_the_shape_says() -> None:
    data = b"".join(ctypes.c_double(number) for number in range(8))
    assert tensor.from_bytes(data, "complex128", (2, 2)).tolist() == [[1j, 2 + 3j], [4 + 5j, 6 + 7j]]
    assert tensor.from_bytes(data[:16], "complex128", ()).tolist() == 1j


@pytest.mark.parametrize(
    ("dtype", "code", "numbers", "shape", "shown"),
    [
        ("float32", "f", [0.1, -2.5, float("nan"), 3e9], (2, 2), "float32, [2, 2], cpu: [[0.1, -2.5], [nan, 3e+09]]"),
        ("int64", "q", [7], (), "int64, [], cpu: 7"),
        ("bool", "b", [0, 1], (1, 2), "bool, [1, 2], cpu: [[False, True]]"),
        ("complex64", "f", [1, 2], (1,), "complex64, [1], cpu: [1+2j]"),
        ("int8", "b", range(16), (16,), f"int8, [16], cpu: {list(range(16))}"),
        ("int8", "b", range(17), (17,), "int8, [17], cpu: [0, 1, 2, ..., 14, 15, 16]"),
        ("int8", "b", range(42), (2, 3, 7),
         "int8, [2, 3, 7], cpu: [[[0, 1, 2, ..., 4, 5, 6], ..., [14, 15, 16, ..., 18, 19, 20]], ...]"),
        ("float16", "f", [], (2, 0), "float16, [2, 0], cpu: [[], []]"),
        ("float16", "f", [], (1 << 40, 0), "float16, [1099511627776, 0], cpu: [[], ..., []]"),
    ],
)  # fmt: skip
def test_a_tensor_shows_what_it_is_and_few_of_its_values(
    dtype: str, code: str, numbers: Sequence[float], shape: tuple[int, ...], shown: str
) -> None:
    assert repr(tensor.from_bytes(array(code, numbers).tobytes(), dtype, shape)) == f"cgbundle.Tensor({shown})"


@given(shapes, st.data())
def test_values_are_shown_as_they_lie_in_any_layout(shape: tuple[int, ...], data: st.DataObject) -> None:
    """A tensor's text is a short line with all values if there are few, else the first and last ones."""
    order = data.draw(st.permutations(range(len(shape))))
    source = tensor.from_bytes(bytes([number % 256 for number in range(prod(shape))]), "uint8", shape)
    laid = tensor.empty("uint8", shape)
    laid = Tensor(laid.address, "uint8", shape, dense(shape, order), laid.owner)
    tensor.copy(laid, source)
    text = repr(laid)
    assert text == repr(source) and len(text) < 250
    if prod(shape) <= 16 and 0 not in shape:
        assert text.endswith(f"cpu: {laid.tolist()})")


def test_nobody_reads_a_gpus_memory_to_show_a_tensor() -> None:
    far = Tensor(16, "float32", (2,), None, None, 3)  # an address that would end the process
    assert repr(far) == "cgbundle.Tensor(float32, [2], cuda:3)"
    with pytest.raises(BufferError, match=r"cgbundle.Tensor\(float32, \[2\], cuda:3\) lies on a GPU"):
        far.tobytes()


def test_float8_matches_torch() -> None:
    torch = pytest.importorskip("torch")
    data = bytes(range(256))
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        expected = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).to(torch.float64).tolist()
        assert list(map(repr, tensor.from_bytes(data, dtype, (256,)).tolist())) == list(map(repr, expected))


def test_slices_are_views_and_assignment_copies() -> None:
    whole = tensor.from_bytes(bytes(range(12)), "uint8", (3, 4))
    part = whole[(slice(1, 3), slice(1, 3))]
    assert part.tolist() == [[5, 6], [9, 10]] and not part.contiguous
    whole[(slice(0, 2), slice(0, 2))] = part
    assert whole.tolist() == [[5, 6, 2, 3], [9, 10, 6, 7], [8, 9, 10, 11]]
    assert part.clone().contiguous and part.clone().tolist() == part.tolist()


def test_a_slice_keeps_the_memory_alive() -> None:
    whole, owner = owned((4,))
    part = whole[(slice(1, 2),)]
    del whole
    assert owner() is not None
    del part
    assert owner() is None


@pytest.mark.parametrize(("shape", "dtype"), [((3,), "float32"), ((2,), "int32")])
def test_a_copy_between_different_tensors_is_refused(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(ValueError, match="cannot copy"):
        tensor.copy(tensor.empty("float32", (2,)), tensor.empty(dtype, shape))


# --- strided copies against NumPy ------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    """Draws a shape, and for two tensors of it the padding after every axis."""
    shape = draw(st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple))
    gaps = st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape))
    return shape, draw(gaps), draw(gaps)


@given(layouts(), st.data(), st.sampled_from(["uint8", "int16", "float32", "complex128"]))
def test_strided_copies_do_what_numpy_does(layout: Any, data: st.DataObject, dtype: str) -> None:
    numpy = pytest.importorskip("numpy")
    shape, source_gaps, target_gaps = layout
    axes = list(range(len(shape)))

    def strided(gaps: list[int], first: int) -> Any:
        order = data.draw(st.permutations(axes))
        frame = [shape[axis] + gaps[axis] for axis in order]
        whole = (numpy.arange(first, first + prod(frame)) % 251).astype(dtype).reshape(frame)
        turned = whole.transpose([order.index(axis) for axis in axes])
        return whole, turned[tuple(slice(0, size) for size in shape)] if shape else turned

    def plain(array: Any) -> Tensor:
        strides = [stride // array.itemsize for stride in array.strides]
        return Tensor(array.__array_interface__["data"][0], dtype, array.shape, strides, array)

    (_, source), (frame, target) = strided(source_gaps, 1), strided(target_gaps, 100)
    expected, place = frame.copy(), target
    tensor.copy(plain(target), plain(source))
    assert place.tolist() == source.tolist()
    # no byte beside the target was written: an assignment by NumPy into a copy of the buffer gives the same buffer
    offset = target.__array_interface__["data"][0] - frame.__array_interface__["data"][0]
    numpy.ndarray(shape, dtype, expected, offset if target.size else 0, target.strides)[...] = source
    assert frame.tobytes() == expected.tobytes()
    assert plain(source).tobytes() == source.tobytes()


# --- NumPy, both ways ------------------------------------------------------------------------------------------------

NUMPY_DTYPES = sorted(set(DTYPES) - {"bfloat16", "float8_e4m3fn", "float8_e5m2"})


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_reads_a_tensor_without_copying(dtype: str) -> None:
    numpy = pytest.importorskip("numpy")
    source = tensor.from_bytes(bytes(range(6 * DTYPES[dtype])) if dtype != "bool" else b"\0\1\1\0\0\1", dtype, (2, 3))
    for seen in (numpy.asarray(source), numpy.from_dlpack(source)):
        assert (str(seen.dtype), seen.shape, seen.tobytes()) == (dtype, (2, 3), source.tobytes())
        assert seen.__array_interface__["data"][0] == source.address


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_a_numpy_array_is_read_without_copying(dtype: str) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(12).reshape(3, 4).astype(dtype)
    for given_array in (array, array.T, array[:, 1:3], array[0, 0], array[:0]):
        given_array = numpy.asarray(given_array)
        imported = read(given_array, "x")
        assert (imported.dtype, imported.shape, imported.device) == (dtype, given_array.shape, None)
        assert imported.tobytes() == given_array.tobytes()
        if given_array.size:
            assert imported.address == given_array.__array_interface__["data"][0]


def test_what_dlpack_gives_is_strided_as_numpy_had_it() -> None:
    numpy = pytest.importorskip("numpy")
    imported = read(numpy.zeros((2, 3, 4), "int16").transpose(2, 0, 1), "x")
    assert (imported.shape, imported.strides) == ((4, 2, 3), (1, 12, 4))


def test_numpy_without_a_dtype_for_it_refuses_and_nothing_leaks() -> None:
    numpy = pytest.importorskip("numpy")
    source, owner = owned((2,), "bfloat16")
    for _ in range(3):
        with pytest.raises((BufferError, RuntimeError)):
            numpy.from_dlpack(source)
    with pytest.raises(AttributeError):
        _ = source.__array_interface__
    del source
    assert owner() is None


def test_a_read_array_lives_as_long_as_the_tensor() -> None:
    numpy = pytest.importorskip("numpy")

    class Array(numpy.ndarray):  # type: ignore[misc, name-defined]
        pass

    array = numpy.arange(4.0).view(Array)
    alive = weakref.ref(array)
    imported = read(array, "x")
    del array
    assert alive() is not None and imported.tolist() == [0.0, 1.0, 2.0, 3.0]
    del imported
    assert alive() is None


def test_an_array_that_its_library_will_not_export_is_an_input_error() -> None:
    numpy = pytest.importorskip("numpy")
    for odd in (numpy.array([None, 1]), numpy.zeros(2, ">f4"), numpy.zeros(2, "datetime64[s]")):
        with raises("input-kind", match="^input 'x': ") as caught:
            read(odd, "x")
        assert "\n" not in str(caught.value)


# --- torch, both ways ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"float8_e4m3fn", "float8_e5m2"}))
def test_torch_reads_a_tensor_and_is_read(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    data = bytes(range(6 * DTYPES[dtype])) if dtype != "bool" else b"\0\1\1\0\0\1"
    source = tensor.from_bytes(data, dtype, (2, 3))
    seen = torch.from_dlpack(source)
    assert (seen.dtype, tuple(seen.shape), seen.data_ptr()) == (getattr(torch, dtype), (2, 3), source.address)
    imported = read(seen.T, "x")
    assert (imported.dtype, imported.shape, imported.strides, imported.address) == (dtype, (3, 2), (1, 3), source.address)
    assert imported.clone().tobytes() == bytes(seen.T.contiguous().view(torch.uint8).flatten().tolist())


def test_torch_keeps_the_memory_until_it_lets_go() -> None:
    torch = pytest.importorskip("torch")
    source, owner = owned((2, 3))
    seen = torch.from_dlpack(source)
    del source
    assert owner() is not None and seen.sum().item() == 0
    part = seen[1]
    del seen
    assert owner() is not None
    del part
    assert owner() is None


def test_torch_reads_a_scalar_and_an_empty_tensor() -> None:
    torch = pytest.importorskip("torch")
    assert torch.from_dlpack(tensor.from_bytes(b"\5", "uint8", ())).item() == 5
    assert tuple(torch.from_dlpack(tensor.empty("float32", (0, 3))).shape) == (0, 3)
    assert read(torch.tensor(5), "x").tolist() == 5


def test_a_tensor_that_torch_still_holds_when_python_ends_does_no_harm() -> None:
    pytest.importorskip("torch")
    code = """
import torch
from cgbundle.tensors.tensor import empty
kept = [torch.from_dlpack(empty(dtype, (2, 3))) for dtype in ("float32", "bfloat16")]
unused = [empty(dtype, (2, 3)).__dlpack__() for dtype in ("float32", "bfloat16")]
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "bundles")}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- capsules --------------------------------------------------------------------------------------------------------


def test_numpy_keeps_the_memory_until_it_lets_go() -> None:
    numpy = pytest.importorskip("numpy")
    for read in (numpy.from_dlpack, numpy.asarray):
        source, owner = owned((2, 3))
        seen = read(source)
        del source
        assert owner() is not None and seen.sum() == 0
        del seen
        assert owner() is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_capsule_that_nobody_takes_lets_go_of_the_memory(dtype: str) -> None:
    """NumPy exports the capsules of the dtypes that it has. It has no bfloat16."""
    source, owner = owned((2, 3), dtype)
    capsules = [source.__dlpack__() for _ in range(3)]
    del source
    assert owner() is not None
    del capsules
    assert owner() is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_consumer_that_refuses_keeps_its_exception_and_nothing_leaks(dtype: str) -> None:
    """A consumer in C frees its arguments, a tensor and a capsule, while an exception is set."""

    source, owner = owned((2, 3), dtype)
    for _ in range(3):
        with pytest.raises(TypeError, match="ord"):
            ord(source.__dlpack__())  # type: ignore[arg-type]
    del source
    assert owner() is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_that_goes_with_its_capsule_keeps_the_exception(dtype: str) -> None:
    source, owner = owned((2, 3), dtype)
    source.__dlpack__()
    reference = [source]
    del source
    with pytest.raises(TypeError, match="ord"):
        ord(reference.pop())  # type: ignore[arg-type]
    assert owner() is None


def test_a_consumers_tensor_that_dies_with_an_exception_keeps_it() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    for consume in (numpy.from_dlpack, torch.from_dlpack):
        source, owner = owned((2, 3))
        with pytest.raises(TypeError, match="ord"):
            ord(consume(source))
        del source
        assert owner() is None


def test_without_numpy_capsules_are_ours_and_let_go_too() -> None:
    code = """
import ctypes, sys, weakref
from cgbundle.tensors import capsules
from cgbundle.tensors.tensor import Tensor
class Owner:
    memory = (ctypes.c_char * 64)()
owner = Owner()
alive = weakref.ref(owner)
made = Tensor(ctypes.addressof(owner.memory), "float32", (4,), None, owner)
del owner
for _ in range(3):
    try:
        ord(made.__dlpack__())
    except TypeError as error:
        assert "ord" in str(error)
found = Tensor(*capsules.read(made, "x"))
del made
assert alive() is not None and found.tolist() == [0.0] * 4
del found
assert alive() is None
assert "numpy" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "bundles")}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_our_own_capsules_are_read_back() -> None:
    source = tensor.from_bytes(bytes(range(24)), "float32", (2, 3))
    imported = read(source, "x")
    assert (imported.address, imported.dtype, imported.shape, imported.strides) == (source.address, "float32", (2, 3), (3, 1))


def test_reading_keeps_the_producers_memory() -> None:
    source, owner = owned((2, 3))
    imported = read(source, "x")
    del source
    assert owner() is not None
    del imported
    assert owner() is None


def test_a_copy_that_is_asked_for_is_one() -> None:
    """With `copy=True` of the DLPack standard, the consumer may write to the result."""
    numpy = pytest.importorskip("numpy")
    source = tensor.from_bytes(b"abcd", "uint8", (4,))
    place = numpy.from_dlpack(source, copy=True).__array_interface__["data"][0]
    assert place != source.address
    kept = numpy.from_dlpack(source, copy=True)
    ctypes.memset(source.address, 0, 4)
    assert kept.tobytes() == b"abcd"
    assert numpy.from_dlpack(source, copy=False).__array_interface__["data"][0] == source.address


def test_a_gpu_cannot_be_asked_of_a_tensor_on_the_cpu() -> None:
    with pytest.raises(BufferError):
        tensor.empty("float32", (2,)).__dlpack__(dl_device=(library.CUDA, 0))
    assert tensor.empty("float32", (2,)).__dlpack__(dl_device=(library.CPU, 0), stream=None, max_version=(1, 0)) is not None


class Producer:
    """A tensor of an unknown library, which only supports DLPack."""

    def __init__(self, device: int, capsule: object) -> None:
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **options: Any) -> object:
        return self.capsule


def test_a_device_that_is_neither_cpu_nor_cuda_is_refused() -> None:
    with raises("input-kind", match="^input 'x': DLPack device type 8 is neither CPU nor CUDA"):
        capsules.read(Producer(8, None), "x")


@pytest.mark.parametrize("field", ["lanes", "bits", "code"])
def test_an_unknown_dlpack_dtype_is_refused(field: str) -> None:
    source = tensor.empty("float32", (2,))
    capsule = capsules.export(source.address, source.dtype, source.shape, source.strides, source.owner, (library.CPU, 0))
    managed = capsules.Managed.from_address(capsules._capsule_pointer(capsule, b"dltensor"))
    setattr(managed.tensor, field, 9)
    with raises("input-kind", match=r"^input 'x': DLPack dtype \(code \d+, \d+ bits, \d+ lanes\) is not supported"):
        capsules.read(Producer(library.CPU, capsule), "x")


@given(shapes, st.sampled_from(sorted(DTYPES)))
def test_any_tensor_survives_a_capsule(shape: tuple[int, ...], dtype: str) -> None:
    source = tensor.from_bytes(bytes(prod(shape) * DTYPES[dtype]), dtype, shape)
    view = read(source, "x")
    assert (view.dtype, view.shape, view.strides, view.tobytes()) == (dtype, shape, source.strides, source.tobytes())


@pytest.mark.parametrize(("field", "value"), [("address", -8), ("shape", (2, -3)), ("strides", (1,)), ("dtype", "float31")])
def test_a_tensor_that_was_changed_is_looked_at_again(field: str, value: object) -> None:
    given_again, library = tensor.empty("float32", (2, 3)), tensor.DLPack()
    first = library.take(given_again, "x")
    assert library.take(given_again, "x")[1] is first[1], "one that was not is not"
    setattr(given_again, field, value)
    with raises("input-kind", match="^input 'x': "):
        library.take(given_again, "x")
