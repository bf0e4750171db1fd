"""Functions that are linked to CPU code instead of libtorch equal torch, alone and in a bundle."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from ctypes import byref, c_bool, c_double, c_float, c_int32, c_int64, c_long, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import cgbundle
import cgcompile
from cgbundle.cpu import libtorch
from cgbundle.cpu.machine import processor_flags
from cgcompile.targets.kernels import standalone
from cgcompile.targets.requirements import compiler
from tests.helpers.own_functions import Code, own_functions
from tests.helpers.places import ROOT
from tests.helpers.raising import raises
from tests.operators.forms import forms, judged

FLOAT = 6
TOLERANCE = 2e-5

needs_vectors = pytest.mark.skipif("avx2" not in processor_flags(), reason="without AVX2 there are no vectors of such names")


@pytest.fixture(scope="module", params=["native", "x86-64-v3"] if os.uname().machine == "x86_64" else ["native"])
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Code:
    return own_functions(tmp_path_factory.mktemp("standalone") / f"{request.param}.so", request.param)


@st.composite
def matrices(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """Draws random matrices, with either axis contiguous, with or without gaps."""
    gaps = draw(st.sampled_from([0, 0, 1, 5]))
    *outer, rows, columns = shape
    if draw(st.booleans()):
        return torch.randn(*outer, rows, columns + gaps)[..., :columns]
    return torch.randn(*outer, columns, rows + gaps)[..., :rows].mT


@st.composite
def laid_out(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """Draws random tensors with axes in any memory order, some with stride 0, with or without gaps."""
    order = draw(st.permutations(range(len(shape))))
    repeated = [draw(st.integers(0, 7)) == 0 for _ in shape]
    tensor = draw(matrices(tuple(1 if repeated[axis] else shape[axis] for axis in order)))
    return tensor.permute([order.index(axis) for axis in range(len(shape))]).expand(shape)


sizes = st.one_of(st.integers(1, 40), st.sampled_from([48, 64, 127, 384, 400]))


@settings(max_examples=60, deadline=None)
@given(st.data(), sizes, sizes, sizes)
def test_products_are_torchs(code: Code, data: st.DataObject, m: int, k: int, n: int) -> None:
    a, b, out = data.draw(matrices((m, k))), data.draw(matrices((k, n))), torch.full((m, n), float("nan"))
    assert code("mm_out", out, a, b) == 0
    torch.testing.assert_close(out, a @ b, atol=TOLERANCE * k, rtol=0)
    added = data.draw(st.sampled_from([torch.randn(n), torch.randn(1, n), torch.randn(m, n), torch.randn(1), torch.randn(m, 1)]))
    beta, alpha = data.draw(st.sampled_from([(1.0, 1.0), (0.0, 1.0), (0.5, 2.0)]))
    out = torch.full((n, m), float("nan")).mT if data.draw(st.booleans()) else torch.full((m, n), float("nan"))
    assert code("addmm_out", out, added, a, b, c_double(beta), c_double(alpha)) == 0
    torch.testing.assert_close(out, torch.addmm(added, a, b, beta=beta, alpha=alpha), atol=TOLERANCE * k, rtol=0)


def test_forms_of_every_function_are_torchs_or_refused(code: Code) -> None:
    wrong = {form.text: verdict for form in forms(code, 1, 40) if (verdict := judged(form)).startswith("wrong")}
    assert not wrong


def test_a_product_of_nothing_is_what_it_is_added_to(code: Code) -> None:
    a, b, added = torch.empty(30, 0), torch.empty(0, 40), torch.randn(40)
    out, more = torch.full((30, 40), float("nan")), torch.full((30, 40), float("nan"))
    assert code("mm_out", out, a, b) == 0
    assert code("addmm_out", more, added, a, b, c_double(1), c_double(1)) == 0
    assert torch.count_nonzero(out) == 0 and torch.equal(more, added.expand(30, 40))


@settings(max_examples=20, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 33), st.integers(1, 40), st.integers(1, 33))
def test_batched_products_are_torchs(code: Code, data: st.DataObject, batch: int, m: int, k: int, n: int) -> None:
    a, b, out = data.draw(matrices((batch, m, k))), data.draw(matrices((batch, k, n))), torch.full((batch, m, n), float("nan"))
    assert code("bmm_out", out, a, b) == 0
    torch.testing.assert_close(out, a @ b, atol=TOLERANCE * k, rtol=0)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 130), st.integers(1, 130), st.integers(1, 40))
def test_attention_is_torchs(code: Code, data: st.DataObject, batch: int, heads: int, rows: int, keys: int, width: int) -> None:
    causal = data.draw(st.booleans())
    keys = rows if causal else keys
    q, k, v = [data.draw(laid_out((batch, heads, length, width))) for length in (rows, keys, keys)]
    mask = None
    if not causal and data.draw(st.booleans()):
        shape = data.draw(st.sampled_from([(batch, 1, rows, keys), (1, heads, rows, 1), (1, 1, 1, keys), (rows, keys), (1, keys)]))
        mask = torch.where(torch.rand(shape) < 0.7, 0.0, float("-inf"))
        mask[..., 0] = 0.0
    scale = data.draw(st.sampled_from([None, 0.3]))
    output_handle, rest = c_void_p(), c_void_p()
    given_mask = byref(code.handle(mask)) if mask is not None else None
    given_scale = byref(c_double(scale)) if scale is not None else None
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert code(name, q, k, v, c_double(0), c_int32(causal), given_mask, given_scale, byref(output_handle), byref(rest)) == 0
    # torch (2.13) reads wrong memory if the rows of q have stride 0: a leading dimension of 0
    plain = [tensor.contiguous() for tensor in (q, k, v)]
    want = F.scaled_dot_product_attention(*plain, attn_mask=mask, is_causal=causal, scale=scale)
    actual = code.taken(output_handle, want)
    torch.testing.assert_close(actual, want, atol=1e-5, rtol=1e-5)
    assert actual.stride() == torch.empty_like(q).stride(), "what compiled code takes for granted of it"
    code.library.aoti_torch_delete_tensor_object(rest)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_copy_is_laid_out_as_torchs(code: Code, data: st.DataObject, shape: list[int]) -> None:
    tensor, output_handle = data.draw(laid_out((*shape, 2))), c_void_p()
    assert code.library.aoti_torch_clone(code.handle(tensor), byref(output_handle)) == 0
    actual, want = code.taken(output_handle, tensor), tensor.clone()
    assert torch.equal(actual, want) and actual.stride() == want.stride()


NUMBERS = st.one_of(
    st.floats(width=32),
    st.floats(-10, 10, width=32),
    st.floats(-20000, 20000, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1.0, 0.625, 8191.5, 8192.0, 88.7, 1e38, float("inf"), float("-inf"), float("nan")]),
)


@needs_vectors
@pytest.mark.parametrize("name", ["exp", "log", "log1p", "tanh", "sin", "cos"])
@settings(max_examples=100, deadline=None)
@given(values=st.lists(NUMBERS, min_size=16, max_size=16))
def test_functions_of_vectors_are_right_to_two_units_in_the_last_place(code: Code, name: str, values: list[float]) -> None:
    operands = torch.tensor(values, dtype=torch.float32)
    actual = torch.empty(16)
    code.library[f"{name}_of"](c_void_p(operands.data_ptr()), c_void_p(actual.data_ptr()), c_long(16))
    want = getattr(torch, name)(operands.double())
    rounded = want.float()
    unit = torch.maximum(
        torch.nextafter(rounded.abs(), torch.tensor(torch.inf)).double() - rounded.abs().double(), torch.tensor(1e-45)
    )
    if name in ("sin", "cos"):
        unit = torch.full_like(unit, 2.0**-24)  # for large angles, the error near zeros is absolute
    special = ~torch.isfinite(rounded) | (rounded == 0)
    assert torch.equal(torch.nan_to_num(actual[special], nan=7.0), torch.nan_to_num(rounded[special], nan=7.0))
    error = ((actual.double() - want).abs() / unit)[~special]
    assert error.numel() == 0 or float(error.max()) <= 2, (operands[~special][error.argmax()], error.max())


sides = st.tuples(st.integers(1, 5), st.integers(1, 5))
steps = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 3), st.sampled_from([1, 3, 17]), st.sampled_from([1, 5, 40]), sides, steps)
def test_convolutions_are_torchs(
    code: Code, data: st.DataObject, batch: int, channels: int, out_channels: int, kernel: tuple[int, int], stride: tuple[int, int]
) -> None:
    padding, dilation = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3))), data.draw(steps)
    room = [step * (side - 1) + 1 + data.draw(st.integers(0, 12)) for side, step in zip(kernel, dilation, strict=True)]
    x, weight = torch.randn(batch, channels, *room), torch.randn(out_channels, channels, *kernel)
    if data.draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last)
    if data.draw(st.booleans()):
        weight = weight.contiguous(memory_format=torch.channels_last)
    bias, output_handle = torch.randn(out_channels) if data.draw(st.booleans()) else None, c_void_p()
    numbers = [byref((c_int64 * 2)(*pair)) for pair in (stride, padding, dilation)]
    given_bias = byref(code.handle(bias)) if bias is not None else None
    sized = [word for number in numbers for word in (number, c_int64(2))]
    none = byref((c_int64 * 2)(0, 0)), c_int64(2)
    assert code("convolution", x, weight, given_bias, *sized, c_int32(0), *none, c_int64(1), byref(output_handle)) == 0
    # oneDNN's convolution (torch 2.13) crashes for some padded inputs: so torch gets inputs with padding
    want = F.conv2d(F.pad(x, (padding[1], padding[1], padding[0], padding[0])), weight, bias, stride, 0, dilation)
    place, library = c_void_p(), libtorch.LibTorch(code.library)
    _, sizes, strides = library.layout(output_handle.value or 0)
    assert tuple(sizes) == want.shape
    if min(want.shape) > 1 and min(x.shape) > 1 and min(weight.shape) > 1:
        assert tuple(strides) == want.stride(), "what compiled code takes for granted of it"
    assert library.data_pointer(output_handle, byref(place)) == 0
    numbers_of = torch.frombuffer(bytearray(ctypes.string_at(place.value or 0, want.nbytes)), dtype=torch.float32)
    torch.testing.assert_close(numbers_of.as_strided(tuple(sizes), tuple(strides)), want, atol=1e-4, rtol=1e-4)
    code.library.aoti_torch_delete_tensor_object(output_handle)


def test_a_convolution_of_no_pictures(code: Code) -> None:
    numbers = [word for _ in range(3) for word in (byref((c_int64 * 2)(1, 1)), c_int64(2))]
    none, output_handle = (byref((c_int64 * 2)(0, 0)), c_int64(2)), c_void_p()
    tensors = torch.empty(0, 3, 9, 9), torch.randn(5, 3, 3, 3), None
    assert code("convolution", *tensors, *numbers, c_int32(0), *none, c_int64(1), byref(output_handle)) == 0
    assert tuple(libtorch.LibTorch(code.library).layout(output_handle.value or 0)[1]) == (0, 5, 9, 9)
    code.library.aoti_torch_delete_tensor_object(output_handle)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.integers(1, 4), max_size=4), st.sampled_from(["float32", "int64", "int32", "bool"]))
def test_running_sums_are_torchs(code: Code, data: st.DataObject, shape: list[int], dtype: str) -> None:
    tensor = (
        (data.draw(laid_out((*shape, 3))) * 3).to(getattr(torch, dtype)) if shape else torch.ones((), dtype=getattr(torch, dtype))
    )
    dim, output_handle = data.draw(st.integers(-max(1, tensor.dim()), max(1, tensor.dim()) - 1)), c_void_p()
    assert code("cumsum", tensor, c_int64(dim), None, byref(output_handle)) == 0
    want = torch.cumsum(tensor, dim)
    assert torch.equal(code.dense(output_handle, want), want)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 200), st.booleans())
def test_the_largest_and_smallest_are_torchs_of_equal_ones_too(
    code: Code, data: st.DataObject, shape: list[int], length: int, largest: bool
) -> None:
    tensor = data.draw(laid_out((*shape, length))).permute(data.draw(st.permutations(range(len(shape) + 1))))
    if data.draw(st.booleans()):
        tensor = (tensor * 2).round()  # makes many elements equal
    if data.draw(st.booleans()):
        tensor = torch.where(torch.rand(tensor.shape) < 0.1, torch.nan, tensor)
    if data.draw(st.booleans()):
        tensor = tensor.bfloat16()
    dim = data.draw(st.integers(-tensor.dim(), tensor.dim() - 1))
    k = data.draw(st.integers(0, tensor.shape[dim]))
    values, places, ordered = c_void_p(), c_void_p(), data.draw(st.booleans())
    assert code("topk", tensor, c_int64(k), c_int64(dim), c_int32(largest), c_int32(ordered), byref(values), byref(places)) == 0
    want = torch.topk(tensor, k, dim, largest, ordered)
    torch.testing.assert_close(code.dense(values, want[0]), want[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(code.dense(places, want[1]), want[1])


@pytest.mark.parametrize(("value", "kind"), [(True, c_bool), (-7, c_int64), (5, c_int32), (0.5, c_float)])
def test_an_item(code: Code, value: float, kind: type[Any]) -> None:
    dtype = {c_bool: torch.bool, c_int64: torch.int64, c_int32: torch.int32, c_float: torch.float32}[kind]
    tensor, scalar = torch.tensor([value], dtype=dtype), kind()
    item = code.library[f"aoti_torch_item_{str(dtype).removeprefix('torch.')}"]
    again = c_void_p()
    assert code.library.aoti_torch_assign_tensors_out(code.handle(tensor), byref(again)) == 0
    assert item(again, byref(scalar)) == 0 and scalar.value == value
    assert item(code.handle(tensor.expand(2)), byref(scalar)) and item(code.handle(torch.zeros(1, dtype=torch.int8)), byref(scalar))


@pytest.mark.parametrize("rows", [83, 200, 711])
def test_bands_of_rows_have_the_bits_of_all_rows_at_once(code: Code, rows: int) -> None:
    """A product with cached panels runs in bands of rows that fit into the processor's cache: of these rows 84, or fewer."""
    a, weight, added, out = torch.randn(rows, 1550), torch.randn(70, 1550), torch.randn(70), torch.empty(rows, 70)
    code.library.cgbundle_fix(c_void_p(weight.data_ptr()), c_int64(weight.nbytes))
    products = []
    for _ in range(3):
        assert code("addmm_out", out.fill_(float("nan")), added, a, weight.T, c_double(1), c_double(1)) == 0
        products.append(out.clone())
    code.library.cgbundle_release(c_void_p(weight.data_ptr()))
    assert torch.equal(products[0], products[1]) and torch.equal(products[0], products[2])
    torch.testing.assert_close(products[0], torch.addmm(added, a, weight.T), atol=TOLERANCE * 1550, rtol=0)


def test_panels_are_kept_of_memory_that_is_fixed_alone(code: Code) -> None:
    a, weight = torch.randn(5, 64), torch.randn(80, 64)
    begin, out = c_void_p(weight.data_ptr()), torch.empty(5, 80)

    def product() -> torch.Tensor:
        assert code("mm_out", out, a, weight.T) == 0
        return out.clone()

    first, before = product(), weight.clone()
    code.library.cgbundle_fix(begin, c_int64(weight.nbytes))
    code.library.cgbundle_fix(begin, c_int64(weight.nbytes))
    assert all(torch.equal(product(), first) for _ in range(3))
    weight.zero_()
    assert torch.equal(product(), first)  # uses the cached panels
    assert code("mm_out", part := torch.empty(5, 40), a, weight[40:].T) == 0
    assert torch.count_nonzero(part) == 0  # another matrix in the same memory
    code.library.cgbundle_release(begin)
    assert torch.equal(product(), first)
    code.library.cgbundle_release(begin)
    assert torch.count_nonzero(product()) == 0
    weight.copy_(before)
    assert all(torch.equal(product(), first) for _ in range(3))


def test_what_it_cannot_do_is_an_error(code: Code) -> None:
    half = torch.zeros(2, 2, dtype=torch.float16)
    assert code("mm_out", half, half, half)
    assert code("cumsum", half, c_int64(0), None, byref(c_void_p()))
    assert code("cumsum", torch.zeros(2), c_int64(0), byref(c_int32(7)), byref(c_void_p()))  # asks for a result in float64
    assert code("mm_out", torch.zeros(2, 2), torch.zeros(2), torch.zeros(2, 2))
    dropout = (c_double(0.5), c_int32(0), None, None, byref(c_void_p()), byref(c_void_p()))
    assert code("_scaled_dot_product_flash_attention_for_cpu", *[torch.zeros(1, 1, 2, 2)] * 3, *dropout)
    plain = (c_double(0), c_int32(0), None, None, byref(c_void_p()), byref(c_void_p()))
    for other in ((1, 4, 2, 2), (3, 6, 2, 2), (1, 6, 2, 4)):  # heads that are not multiples; different rows and counts
        tensors = torch.zeros(1, 6, 2, 2), torch.zeros(other), torch.zeros(other)
        assert code("_scaled_dot_product_flash_attention_for_cpu", *tensors, *plain)


def test_what_nobody_has_is_named_by_the_linker(tmp_path: Path) -> None:
    source = tmp_path / "code.cpp"
    source.write_text('extern "C" int aoti_torch_cpu_sort(); int run() { return aoti_torch_cpu_sort(); }\n')
    command = [compiler(), "-shared", "-fPIC", str(source), "-o", str(tmp_path / "code.so"), *standalone.LINKED]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    refusal = standalone.missing(said)
    assert refusal is not None and refusal.code == "not-standalone" and "calls aoti_torch_cpu_sort," in str(refusal)
    assert standalone.missing("error: something else") is None


# --- a bundle -------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Products, a sum with a scalar tensor, attention with either axis first and with grouped heads, an exponential, a norm,
    state."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 5), nn.LayerNorm(32)
        self.sequence_first = nn.MultiheadAttention(32, 2, batch_first=True)
        self.scale, self.shift = nn.Parameter(torch.randn(32, 32) / 6), nn.Parameter(torch.tensor(0.5))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        x = self.sequence_first(x, x, x, need_weights=False)[0] @ self.scale + self.shift
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True).transpose(1, 2).flatten(2)
        return self.out(F.gelu(mixed)).softmax(-1), self.calls.clone()


@pytest.fixture(scope="module")
def standalone_bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, nn.Module]]:
    torch.manual_seed(0)
    model = Attention().eval()

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, 7, 32),)

    path = tmp_path_factory.mktemp("standalone") / "attention.cgb"
    cgcompile.build(model, inputs, sizes=[1, 4], out=path, target="cpu", standalone=True, progress="silent")
    yield path, model


WITHOUT_TORCH = """
import sys
sys.path[:] = [{runtime!r}, *[each for each in sys.path if "site-packages" not in each]]
import cgbundle
from cgbundle.self_test import inputs_of
with cgbundle.load({path!r}, check="full") as program:
    self_test = program.open_self_test()
    for key in program.int_keys:
        program.replay(inputs_of(self_test, program.manifest.entries[0], key))
    self_test.close()
    print("torch" in open("/proc/self/maps").read(), program.manifest.target.torch == "")
"""


def test_a_bundle_needs_nothing_of_torchs(standalone_bundle: tuple[Path, nn.Module]) -> None:
    path, _ = standalone_bundle
    text = WITHOUT_TORCH.format(path=str(path), runtime=str(ROOT / "bundles"))
    done = subprocess.run([sys.executable, "-I", "-c", text], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_its_answers_beside_torch_in_the_same_process(standalone_bundle: tuple[Path, nn.Module]) -> None:
    path, model = standalone_bundle
    model.get_buffer("calls").zero_()
    with cgbundle.load(path) as program, cgbundle.load(path, threads=2) as two, torch.no_grad():
        session = program.session()
        for size in (1, 4):
            x = torch.randn(size, 7, 32)
            want = model(x)[0]
            for caller in (program, two, session):
                torch.testing.assert_close(caller(x)[0], want, atol=1e-5, rtol=1e-5)
        weight = model.get_parameter("out.weight")
        program.update({"out.weight": weight * 2}, partial=True)
        x = torch.randn(4, 7, 32)
        weight.mul_(2)
        torch.testing.assert_close(program(x)[0], model(x)[0], atol=1e-5, rtol=1e-5)
        weight.div_(2)


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double().topk(2, 1).values  # cgcompile's function can be linked, but takes no float64


def test_where_a_function_of_ours_fails_torchs_takes_its_place(tmp_path: Path) -> None:
    model, path = Doubles().eval(), tmp_path / "doubles.cgb"
    cgcompile.build(model, lambda batch: (torch.randn(batch, 5),), sizes=[2], out=path, target="cpu", progress="silent")
    with cgbundle.load(path) as program:
        x = torch.randn(2, 5)
        assert program.manifest.target.torch and torch.equal(program(x), model(x))


def test_code_without_its_own_functions_is_told_apart(tmp_path: Path) -> None:
    code = tmp_path / "model.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-x", "c++", "-o", code, "-"], input=b"int nothing() { return 0; }", check=True)
    assert libtorch.of_code(code.read_bytes(), code.name) is None


def test_without_openmp_it_is_said(monkeypatch: pytest.MonkeyPatch, standalone_bundle: tuple[Path, nn.Module]) -> None:
    monkeypatch.setattr(libtorch, "OPENMP", "libnowhere.so.1")
    with raises("library-missing", match="libnowhere"):
        cgbundle.load(standalone_bundle[0])


def test_for_a_gpu_it_is_refused() -> None:
    with raises("target-unavailable", match="standalone"):
        cgcompile.build(Attention(), lambda batch: (torch.zeros(batch, 7, 32),), sizes=[1], target="sm_90", standalone=True)
