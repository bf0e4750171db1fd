"""Operators that PyTorch keeps out of CUDA graphs, custom operators, sparse results, indexed writes; and similar allowed ones."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ..case import case, ragged, rows, sequences, tokens, two

_case = partial(case, kind="operators")

CUSTOM = "custom-operator"


# --- custom operators of the corpus ---------------------------------------------------------------------------


@torch.library.custom_op("parity::scaled", mutates_args=())
def scaled(x: Tensor, by: float) -> Tensor:
    """A correct custom operator."""
    return x * by


@torch.library.custom_op("parity::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def unsafe(x: Tensor) -> Tensor:
    """A custom operator tagged as impossible to capture."""
    return x + 1


@torch.library.custom_op("parity::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    """The size of the result depends on data."""
    return x[x > 0]


@torch.library.custom_op("parity::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    """Has no fake implementation."""
    return x - 1


@torch.library.custom_op("parity::fill_ones", mutates_args=("x",))
def fill_ones(x: Tensor) -> None:
    """Writes to its argument."""
    x.fill_(1)


@torch.library.custom_op("fbgemm::jagged_to_padded_dense", mutates_args=())
def jagged_to_padded_dense(values: Tensor, offsets: list[Tensor], max_lengths: list[int], padding_value: float) -> Tensor:
    """Replaces FBGEMM's operator of this name."""
    return torch.ops.aten._jagged_to_padded_dense_forward(values, offsets, max_lengths, padding_value).clone()


@torch.library.custom_op("parity::to_coordinates", mutates_args=())
def to_coordinates(x: Tensor) -> Tensor:
    """Returns the first row of a dense matrix, in coordinate format."""
    return _first_row(x)


@torch.library.custom_op("parity::to_dense", mutates_args=())
def to_dense(x: Tensor) -> Tensor:
    """Converts a sparse matrix to a dense one."""
    return x.to_dense()


def _first_row(x: Tensor) -> Tensor:
    columns = torch.arange(x.shape[1], device=x.device)
    return torch.sparse_coo_tensor(torch.stack([torch.zeros_like(columns), columns]), x[0], x.shape)


scaled.register_fake(lambda x, by: torch.empty_like(x))
to_coordinates.register_fake(_first_row)
to_dense.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))
unsafe.register_fake(lambda x: torch.empty_like(x))
positive.register_fake(lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
fill_ones.register_fake(lambda x: None)
jagged_to_padded_dense.register_fake(
    lambda values, offsets, max_lengths, padding_value: values.new_empty(offsets[0].shape[0] - 1, max_lengths[0], values.shape[1])
)


class CustomOperator(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.parity.scaled(x, 2.0).relu()


class OperatorByItsName(nn.Module):
    """An operator of PyTorch, called like a custom one."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.hardswish(x)


class CustomOperatorOnTheHost(nn.Module):
    """The same operator, which the user places on the host."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.parity.scaled(x.tanh(), 2.0).relu()


class UnsafeOperator(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.parity.unsafe(x.relu()).softmax(-1)


class OperatorOfUnknownSize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ops.parity.positive(x).sum()


class OperatorWithoutFake(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.parity.opaque(x).relu()


class OperatorThatWrites(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        ones = torch.empty_like(x)
        torch.ops.parity.fill_ones(ones)
        return x + ones


class FbgemmJagged(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return torch.ops.fbgemm.jagged_to_padded_dense(x.flatten(0, 1), [offsets], [6], 0.0)


# --- quantization ---------------------------------------------------------------------------------------------


class MovingAverageObserver(nn.Module):
    """The observer of quantization-aware training, not turned off."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("on", torch.ones(1, dtype=torch.int64))
        self.register_buffer("low", torch.zeros(1))
        self.register_buffer("high", torch.ones(1))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("zero", torch.zeros(1, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fused_moving_avg_obs_fake_quant(
            x, self.on, self.on, self.low, self.high, self.scale, self.zero, 0.01, 0, 255, 0
        )


class StaticQuantize(nn.Module):
    """Quantization with fixed scale and zero point."""

    def forward(self, x: Tensor) -> Tensor:
        return (x / 0.1).round().clamp(-128, 127) * 0.1


class DynamicQuantize(nn.Module):
    """Scales that are computed from the data, as tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 127, (8, 8), dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True) / 127
        quantized = (x / scale).round().clamp(-128, 127).to(torch.int8)
        return (quantized.float() @ self.weight.float().t()) * scale


# --- writes by index ------------------------------------------------------------------------------------------


class WriteByMask(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = x.clone()
        out[y > 0] = 0.0
        return out


class WriteRowsByMask(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.index_put((y[:, 0] > 0,), y[0])


class WriteByByteMask(nn.Module):
    """A uint8 mask is an older form of a bool mask."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.index_put(((y[:, 0] > 0).to(torch.uint8),), y[0])


class WriteByIndex(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = x.clone()
        out[:, torch.arange(0, 8, 2, device=x.device)] = y[:, :4]
        return out


class AddByIndex(nn.Module):
    """Sums by index, as in gradients of embeddings and message passing."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(16, device=ids.device).index_put((ids,), torch.ones((), device=ids.device), accumulate=True)


class AddByIndexInOrder(AddByIndex):
    """The same model with deterministic algorithms enabled."""


class ScatterAdd(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.scatter_add(1, y.argsort(1), y)


class ScatterAddInOrder(ScatterAdd):
    """The same model with deterministic algorithms enabled."""


class CumsumInOrder(nn.Module):
    """Deterministic algorithms are enabled, but nothing scatters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1).sort(-1).values


# --- sparse, complex, linear algebra --------------------------------------------------------------------------


class SparseOutput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().to_sparse()


class SparseInside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.parity.to_dense(torch.ops.parity.to_coordinates(x.relu())).tanh()


def one_size() -> tuple[Tensor]:
    """float32 [4, 8]: sizes of sparse tensors cannot vary in an exported program."""
    return (torch.randn(4, 8),)


class Spectrum(nn.Module):
    """Complex intermediate values, real inputs and outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * 2j, n=8)


class ComplexOutput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


class Cholesky(nn.Module):
    """Error codes are returned but not read."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.cholesky_ex(x.transpose(1, 2) @ x + torch.eye(8, device=x.device)).L


class Inverse(nn.Module):
    """An inverse that raises an error for singular matrices."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(x.transpose(1, 2) @ x + torch.eye(8, device=x.device))


CASES = (
    _case(CustomOperator, rows, CUSTOM, near=("fallback-op", "cudagraph-unsafe")),
    _case(OperatorByItsName, rows, near=("custom-operator",)),
    _case(CustomOperatorOnTheHost, rows, CUSTOM, "fallback-op", fallback_ops=("parity::scaled",)),
    _case(UnsafeOperator, rows, CUSTOM, "cudagraph-unsafe"),
    _case(OperatorOfUnknownSize, rows, CUSTOM, "data-dependent-shape", "data-dependent-follower"),
    _case(OperatorWithoutFake, rows, "export-failed"),
    _case(OperatorThatWrites, rows, CUSTOM, near=("mutated-input",)),
    _case(FbgemmJagged, ragged, CUSTOM, "incompatible-operator"),
    _case(MovingAverageObserver, rows, "mutated-buffer", "incompatible-operator"),
    _case(StaticQuantize, rows, near=("incompatible-operator",)),
    _case(DynamicQuantize, rows, near=("incompatible-operator",)),
    _case(WriteByMask, two, "boolean-index-put"),
    _case(WriteRowsByMask, two, "boolean-index-put"),
    _case(WriteByByteMask, two, "boolean-index-put"),
    _case(WriteByIndex, two, near=("boolean-index-put",)),
    _case(AddByIndex, tokens, near=("boolean-index-put",)),
    _case(AddByIndexInOrder, tokens, "deterministic-scatter", deterministic=True),
    _case(ScatterAdd, two, near=("deterministic-scatter",)),
    _case(ScatterAddInOrder, two, "deterministic-scatter", deterministic=True),
    _case(CumsumInOrder, rows, deterministic=True, near=("deterministic-scatter",)),
    _case(SparseOutput, rows, "dtype-unsupported"),
    _case(SparseInside, one_size, CUSTOM, "sparse-output"),
    _case(Spectrum, rows, near=("incompatible-operator",)),
    _case(ComplexOutput, rows, near=("sparse-output",)),
    _case(Cholesky, sequences, near=("host-scalar", "incompatible-operator")),
    _case(Inverse, sequences, "incompatible-operator"),
)
