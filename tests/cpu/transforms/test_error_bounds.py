"""The tolerance of every output follows from the dtypes of its computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from cgbundle.format.schema import Weight
from cgcompile.export.export import export
from cgcompile.export.functionalization import functional
from cgcompile.export.programs import coarsest
from cgcompile.export.signature.signature import describe_signature
from cgcompile.model.load import load_source
from cgcompile.transforms.error_bounds import ErrorBound, error_bounds
from cgcompile.transforms.prepared import Prepared, prepare
from cgcompile.util.tolerance import compare, tolerance
from tests.cpu.models import Batched

F64, F32, F16, BF16 = 1e-10, 1e-4, 1e-2, 4e-2
HALF = torch.bfloat16


def prepared(model: Callable[..., Any] | nn.Module, *inputs: torch.Tensor) -> Prepared:
    module = model if isinstance(model, nn.Module) else Batched(model)
    exported = export(load_source(module, lambda: inputs), {})
    functionalized = {key: functional(program) for key, program in exported.programs.distinct}
    return prepare(exported, describe_signature(exported), functionalized, markers=False)


def bounds(prepared_model: Prepared, *rows: Weight) -> list[tuple[float, bool]]:
    return [(error_bound.bound, error_bound.rounded) for error_bound in error_bounds(prepared_model, rows)]


CASES: list[tuple[str, Callable[[torch.Tensor], Any], list[tuple[float, bool]]]] = [
    ("every output for itself", lambda x: (x + 1, x.to(HALF) + 1, (x * 2).half(), x.double() * 2),
     [(F32, True), (BF16, True), (F16, True), (F64, True)]),
    ("float32 that was rounded to bfloat16 before", lambda x: (x.to(HALF) * 3).float(), [(BF16, True)]),
    ("two branches of one input", lambda x: (x.to(HALF).float(), x * 3), [(BF16, True), (F32, True)]),
    ("what an integer follows from", lambda x: ((x * 2).argmax(-1), (x > 0).sum(-1), x.to(HALF) > x),
     [(0.0, True), (0.0, False), (0.0, True)]),
    ("a view", lambda x: (x + 1).view(2, 2, 2).transpose(0, 1).reshape(-1)[2:], [(F32, True)]),
    ("a write to a part", lambda x: write_part(x), [(BF16, True)]),
    ("complex numbers", lambda x: (torch.complex(x, x), torch.fft.fft(x.double())), [(F32, True), (F64, True)]),
    ("float8 for itself, and on the way", lambda x: (x.to(torch.float8_e4m3fn), x.to(torch.float8_e5m2).float()),
     [(0.13, True), (F32, True)]),
]  # fmt: skip


def write_part(x: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(2, 4)
    whole[0] = (x[0].to(HALF) * 2).float()
    return whole


@pytest.mark.parametrize(("function", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_bound_of_an_output(function: Callable[[torch.Tensor], Any], expected: list[tuple[float, bool]]) -> None:
    assert bounds(prepared(function, torch.rand(2, 4))) == expected


def test_weights_and_inputs_in_a_coarse_dtype_round_nothing_themselves() -> None:
    assert bounds(prepared(lambda x: (x.float() * 2, x + 1), torch.rand(2, 4).to(HALF))) == [(F32, True), (BF16, True)]


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, dtype=HALF))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self.cache[:2] = x[:2].to(HALF) * 2
        self.place += 1
        self.total += x
        out.copy_(self.cache.float())
        return x * 2


def test_written_inputs_and_state_have_bounds_of_their_own() -> None:
    prepared_model = prepared(Keeps(), torch.rand(4), torch.rand(4))
    rows = [
        Weight(name=name, tensor=name, dtype=dtype, shape=(4,), strides=(1,), memory="state", offset=0)
        for name, dtype in (("place", "int64"), ("total", "float32"), ("cache", "bfloat16"))
    ]
    bound_rows = error_bounds(prepared_model, rows)
    assert [(error_bound.title, error_bound.bound, error_bound.rounded) for error_bound in bound_rows] == [
        ("output output (float32)", F32, True), ("input out (float32)", BF16, True), ("state place (int64)", 0.0, False),
        ("state total (float32)", F32, True), ("state cache (bfloat16)", BF16, True),
    ]  # fmt: skip
    assert bound_rows == error_bounds(prepared_model, [replace(row, name=f"model.{row.name}") for row in rows])
    assert bound_rows[2] == ErrorBound(title="state place (int64)", bound=0.0, exact=True, rounded=False)
    assert coarsest(prepared_model.programs) == BF16


INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, HALF, torch.float8_e5m2, torch.complex64, torch.complex128]
)
def test_tensors_are_measured_as_bytes_are(dtype: torch.dtype) -> None:
    """The compiler and the runtime measure errors in the same way."""
    from cgbundle.tensors import comparison
    from cgcompile.model.pytree import dtype_name
    from cgcompile.util.raw_bytes import raw

    rows = [[1.0, 2.0, -4.0], [1.0, 2.5, -4.0], [1.0, NAN, INFINITY], [1.0, NAN, -INFINITY], [NAN, NAN, INFINITY], [0.0, -0.0, 0.5]]
    operands = [torch.tensor(row).to(dtype) for row in rows]
    for want in operands:
        for got in operands:
            data = [raw(tensor).numpy().tobytes() for tensor in (want, got)]
            tensor_difference = compare(want, got)
            assert tensor_difference.error == comparison.difference(dtype_name(dtype), *data)
            if tensor_difference.error:
                assert tensor_difference.text == comparison.describe(dtype_name(dtype), tuple(want.shape), *data)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool, torch.uint64, torch.uint16])
def test_integers_are_measured_as_bytes_are(dtype: torch.dtype) -> None:
    from cgbundle.tensors import comparison
    from cgcompile.model.pytree import dtype_name
    from cgcompile.util.raw_bytes import raw

    want = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype)
    got = torch.tensor([[1, 0, 1], [1, 1, 0]]).to(dtype)
    tensor_difference, data = compare(want, got), [raw(tensor).numpy().tobytes() for tensor in (want, got)]
    assert tensor_difference.error == comparison.difference(dtype_name(dtype), *data) == 2 / 6
    assert tensor_difference.text == comparison.describe(dtype_name(dtype), (2, 3), *data)
    assert tolerance(dtype) == 0


def test_neighbours_above_2_to_the_53_are_not_equal() -> None:
    """They would be equal as float64."""
    assert compare(torch.tensor([2**53]), torch.tensor([2**53 + 1])).error == 1
    assert compare(torch.ones(2), torch.ones(3)).error == compare(torch.ones(2), torch.ones(2).int()).error == INFINITY
    assert compare(torch.ones(0), torch.ones(0)).error == 0


class OneLogit(nn.Module):
    """Cosine similarity of two nearly orthogonal vectors, as SigLIP's logit: a small difference of large numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = torch.linspace(0.1, 0.9, 1 << 12)
        other = other - x * (x @ other) / (x @ x) + x * 1e-6
        return (x @ other).reshape(1)


class Quantized(nn.Module):
    """Activations scaled by their maximum and rounded to int8. A small change of the input rounds some of them differently."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax() / 127
        return torch.round(x / scale) * scale


def test_a_result_that_cancels_has_a_wider_bound() -> None:
    torch.manual_seed(0)
    (error_bound,) = error_bounds(prepared(OneLogit(), torch.rand(1 << 12)))
    assert F32 < error_bound.bound <= BF16


def test_rounding_inside_widens_the_bound() -> None:
    halves = torch.arange(64) + 0.5
    (error_bound,) = error_bounds(prepared(Quantized(), torch.cat([torch.tensor([127.0]), halves])))
    assert F32 < error_bound.bound <= BF16


class LookedUp(nn.Module):
    """A model like `OneLogit` with token ids. Token ids have no rounding errors, but the norm after the embedding has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(4, 1 << 12), nn.LayerNorm(1 << 12)
        self.norm.bias = nn.Parameter(torch.rand(1 << 12))
        self.logit = OneLogit()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        similarity: torch.Tensor = self.logit(self.norm(self.embedding(ids)))
        return similarity


def test_parameters_are_stepped_where_no_input_can_be() -> None:
    torch.manual_seed(0)
    model = LookedUp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (error_bound,) = error_bounds(prepared(model, torch.tensor(1)))
    assert F32 < error_bound.bound <= BF16
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
