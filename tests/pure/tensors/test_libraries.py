"""The caller's tensor library: what is accepted, read in its layout, copied to another layout, and returned."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from cgbundle.format import shapes
from cgbundle.format.schema import TensorSpec
from cgbundle.tensors import tensor
from cgbundle.tensors.input_errors import unreadable
from cgbundle.tensors.library import Descriptor, library_of
from cgbundle.tensors.numpy_arrays import Numpy
from cgbundle.tensors.tensor import DLPack, Tensor
from tests.helpers.raising import raises

numpy = pytest.importorskip("numpy")


def library() -> Numpy:
    numpy_library = library_of(numpy.zeros(1))
    assert isinstance(numpy_library, Numpy)
    return numpy_library


def elements(place: Descriptor) -> list[Any]:
    """Returns the numbers of a descriptor, read by its address and strides."""
    address, shape, dtype, strides, device = place
    assert device is None
    flat: list[Any] = []

    def walk(value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                walk(item)
        else:
            flat.append(value)

    walk(Tensor(address, dtype, shape, strides, None).tolist())
    return flat


BASE = numpy.arange(24, dtype="float32").reshape(2, 3, 4)
READABLE = {
    "row-major": BASE,
    "Fortran order": numpy.asfortranarray(BASE),
    "turned": BASE.transpose(2, 0, 1),
    "strided": BASE[:, ::2, 1:3],
    "reversed": BASE[::-1, :, ::-1],
    "broadcast": numpy.broadcast_to(numpy.float32(3), (2, 3)),
    "empty": BASE[:, :0],
    "scalar": BASE[0, 0, 0],
    "0-d": numpy.array(5, "float32"),
    "one element": BASE[1:, 2:, 3:],
    "a field": numpy.zeros(3, [("a", "u1"), ("b", "f4")])["b"],
    "an aligned field": numpy.ones(3, [("a", "f4"), ("b", "f4")])["b"],
}


@pytest.mark.parametrize("name", READABLE)
def test_an_array_is_read_as_it_lies_or_laid_out_anew(name: str) -> None:
    array = READABLE[name]
    lib = library()
    value, _ = lib.take(array, "x")
    place = lib.describe(value)
    assert (tuple(place[1]), place[2]) == (array.shape, "float32")
    order = tuple(range(array.ndim))
    if place[3] is not None and not shapes.is_dense(place[1], place[3], order):
        value = lib.ordered(value, order)
        place = lib.describe(value)
    assert elements((*place[:3], None, place[4])) == array.flatten().tolist()


def test_a_row_major_array_says_so_and_is_not_copied() -> None:
    place = library().describe(BASE)
    assert place == (BASE.__array_interface__["data"][0], (2, 3, 4), "float32", None, None)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 2, 1)])
def test_ordered_lays_the_axes_out_in_memory_as_asked(order: tuple[int, ...]) -> None:
    reordered = library().ordered(BASE[:, :, ::-1], order)
    assert reordered.tolist() == BASE[:, :, ::-1].tolist()
    assert shapes.is_dense(reordered.shape, library().strides(reordered), order)


def test_a_readonly_array_is_read() -> None:
    array = BASE.copy()
    array.flags.writeable = False
    assert elements(library().take(array, "x")[1]) == list(range(24))


def test_a_numpy_number_is_a_0_d_array() -> None:
    value, _ = library().take(numpy.int64(7), "x")
    assert elements(library().describe(value)) == [7]


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (numpy.zeros(2, "bool"), "bool"),
        (numpy.zeros(2, "longlong"), "int64"),
        (numpy.zeros(2, "complex64"), "complex64"),
        (numpy.zeros(2, [("a", "f4")]), "void32"),
        (numpy.zeros(2, "U3"), "str96"),
        (numpy.zeros(2, object), "object"),
        (numpy.zeros(2, "datetime64[s]"), "datetime64[s]"),
    ],
)
def test_a_dtype_has_a_name_for_the_guards(array: Any, dtype: str) -> None:
    assert library().take(array, "x")[1][2] == dtype


@pytest.mark.parametrize("array", [numpy.zeros(2, ">f4"), numpy.zeros(2, ">i8"), numpy.zeros(2, [("a", ">f4")])])
def test_another_byte_order_is_refused(array: Any) -> None:
    with raises("input-kind", match="input 'x': expected native byte order, got dtype"):
        library().take(array, "x")


@pytest.mark.parametrize("value", [[1.0], 1.0, None, "x", Tensor(0, "float32", (), None, None)])
def test_what_is_no_array_is_refused_beside_numpy(value: Any) -> None:
    with raises("input-kind", match="^input 'x': expected a NumPy array like the first input, got "):
        library().take(value, "x")


def test_a_masked_array_is_refused_since_its_mask_would_be_lost() -> None:
    masked = numpy.ma.masked_array([1.0, 2.0], mask=[False, True])
    with raises("input-kind", match="input 'x': .*mask"):
        library().take(masked, "x")


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3), (1,)])
@pytest.mark.parametrize("dtype", ["float32", "bool", "int64", "complex64"])
def test_an_alias_is_the_memory_and_keeps_its_owner(shape: tuple[int, ...], dtype: str) -> None:
    owner = tensor.empty(dtype, shape)
    alias = library().wrap(owner.address, dtype, shape, owner.strides, owner)
    assert (alias.shape, str(alias.dtype)) == (shape, dtype)
    if alias.size:
        ctypes.memset(owner.address, 1, 1)
        assert alias.reshape(-1)[0] != 0
    copy = library().copy(alias)
    address = owner.address
    del owner
    ctypes.memset(address, 0, 1)  # the owner keeps the memory
    assert type(copy) is numpy.ndarray and copy.flags.owndata and copy.flags.c_contiguous


def test_an_alias_follows_strides() -> None:
    owner = tensor.from_bytes(bytes(range(6)), "uint8", (6,))
    assert library().wrap(owner.address, "uint8", (3, 2), (1, 3), owner).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert library().copy(library().wrap(owner.address, "uint8", (3, 2), (1, 3), owner)).flags.c_contiguous


# --- which library ---------------------------------------------------------------------------------------------------


def test_the_library_follows_from_the_first_input() -> None:
    assert library_of(BASE).name == "numpy"
    assert library_of(numpy.float32(1)).name == "numpy"
    assert library_of(tensor.empty("float32", ())).name == "dlpack"
    assert library_of(None).name == "dlpack"


def test_numpy_is_read_through_dlpack() -> None:
    lib = DLPack()
    assert elements(lib.take(BASE.T, "x")[1]) == BASE.T.flatten().tolist()


@pytest.mark.parametrize("value", [[1.0], 1.0, None, object()])
def test_what_no_library_gave_is_refused(value: Any) -> None:
    with raises("input-kind", match="^input 'x': expected a NumPy array, a torch tensor or a DLPack tensor, got "):
        DLPack().take(value, "x")


class Foreign:
    """A tensor of a library that only supports DLPack."""

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __dlpack__(self, **options: Any) -> object:
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.inner.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return Foreign

    @staticmethod
    def from_dlpack(value: Any) -> Foreign:
        return Foreign(value)


def test_a_foreign_tensor_comes_back_as_its_own_kind() -> None:
    lib = DLPack()
    foreign = Foreign(tensor.empty("float32", (2,)))
    accepted, _ = lib.take(foreign, "x")
    assert accepted.address == foreign.inner.address
    assert isinstance(lib.converted(tensor.empty("float32", (2,)), foreign), Foreign)
    assert isinstance(lib.converted(tensor.empty("float32", (2,)), accepted), Tensor)


# --- torch -----------------------------------------------------------------------------------------------------------


def torch_library() -> Any:
    torch = pytest.importorskip("torch")
    return torch, library_of(torch.zeros(1))


def test_torch_tensors_are_read_as_they_lie() -> None:
    torch, lib = torch_library()
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    for value in (base, base.permute(2, 0, 1), base[:, ::2], base[0, 0, 0], base[:, :0], base.to(torch.bfloat16), base.int()):
        _, place = lib.take(value, "x")
        assert elements(place) == value.flatten().tolist()


def test_a_tensor_that_needs_a_gradient_is_read() -> None:
    torch, lib = torch_library()
    value = torch.ones(2, requires_grad=True) * 2
    assert elements(lib.take(value, "x")[1]) == [2.0, 2.0]
    parameter = torch.nn.Parameter(torch.ones(2))
    assert elements(lib.take(parameter, "x")[1]) == [1.0, 1.0]


def test_a_lazy_conjugate_or_negative_is_read_as_the_numbers_it_stands_for() -> None:
    torch, lib = torch_library()
    value = torch.tensor([1 + 2j, 3 + 4j], dtype=torch.complex64)
    for lazy in (value.conj(), value.conj().imag, value.conj()[:1]):
        kept, _ = lib.take(lazy, "x")
        assert elements(lib.describe(kept)) == lazy.tolist()


@pytest.mark.parametrize("make", ["to_sparse", "to_mkldnn"])
def test_a_torch_tensor_that_is_not_dense_is_refused(make: str) -> None:
    torch, lib = torch_library()
    with raises("input-kind", match="input 'x': expected a dense tensor, got layout"):
        lib.take(getattr(torch.ones(2, 2), make)(), "x")


def test_numpy_beside_torch_is_refused() -> None:
    _, lib = torch_library()
    with raises("input-kind", match="input 'x': expected a torch tensor like the first input, got numpy.ndarray"):
        lib.take(BASE, "x")


def test_a_number_beside_torch_is_answered_with_a_torch_tensor() -> None:
    _, lib = torch_library()
    spec = TensorSpec(name="x", dtype="float32", shape=(), order=())
    with raises("input-kind") as caught:
        lib.take(0.5, "x")
    assert unreadable(caught.value, spec, 0.5, lib.name).hint == "make a tensor of it: torch.tensor(value, dtype=torch.float32)"


def test_a_torch_tensor_elsewhere_has_a_device_that_no_program_has() -> None:
    torch, lib = torch_library()
    assert lib.describe(torch.empty(2, device="meta"))[4] == -1


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 2, 1, 0)])
def test_torch_lays_the_axes_out_as_asked(order: tuple[int, ...]) -> None:
    torch, lib = torch_library()
    value = torch.arange(24.0).reshape(1, 2, 3, 4)
    reordered = lib.ordered(value, order)
    assert torch.equal(reordered, value) and shapes.is_dense(reordered.shape, reordered.stride(), order)


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64"])
def test_a_torch_alias_is_the_memory_and_keeps_its_owner(shape: tuple[int, ...], dtype: str) -> None:
    torch, lib = torch_library()
    owner = tensor.empty(dtype, shape)
    alias = lib.wrap(owner.address, dtype, shape, owner.strides, owner)
    assert (tuple(alias.shape), alias.dtype) == (shape, getattr(torch, dtype))
    if alias.numel():
        assert alias.data_ptr() == owner.address
    copy = lib.copy(alias)
    del owner
    assert copy.is_contiguous() and torch.equal(copy, alias) and (not copy.numel() or copy.data_ptr() != alias.data_ptr())
