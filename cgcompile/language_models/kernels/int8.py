"""8-bit weights of linear layers, with a scale for each row.  They have half the bytes of bfloat16 weights.  Decoding
spends most of its time reading weights, so fewer bytes make it faster.

    weight[row] = scale[row] * eight_bits[row], with scale[row] = max |weight[row]| / 127

Activations keep their dtype.  On a GPU a Triton kernel multiplies in this dtype, and reads the weights once for up to BLOCK_M rows
of activations.  On a CPU, PyTorch's operations or `processor.int8_linear` compute the product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton
from transformers.pytorch_utils import Conv1D

from .processor import int8_linear

BLOCK_M = 64
"""Maximum number of rows of activations that one Triton program multiplies."""

BLOCK_N = 32
"""Number of rows of weights that one Triton program multiplies."""

BLOCK_K = 256
"""Number of elements of each row that an iteration reads, for up to 16 rows of activations.  For more rows it is a quarter of this,
because the blocks must fit in shared memory."""

WARPS, STAGES = 4, 4
"""Triton's options `num_warps` and `num_stages`."""


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights: `weight` int8 (out, in), `scale` float32 (out,), `bias` (out,) or None."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        product = int8_product(x.flatten(0, -2), self.weight, self.scale).unflatten(0, x.shape[:-1])
        return product if self.bias is None else product + self.bias


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes weights (out, in) to 8 bits, and returns them with the scale of each row."""
    values = weight.detach().float()
    scale = (values.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (values / scale[:, None]).round().to(torch.int8), scale


def quantize_linear_layers(network: nn.Module) -> nn.Module:
    """Replaces all linear layers of a network, in place, by layers with 8-bit weights.  Embeddings and experts keep their weights.
    A head that shares its weights with the embeddings gets its own copy."""
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.Linear | Conv1D):
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            parent, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(parent), leaf, Int8Linear(*quantize_rows(weight), module.bias))
    return network


def int8_product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x (rows, in), weight int8 (out, in), scale float32 (out,) -> (rows, out) in the dtype of `x`."""
    if x.device.type != "cpu":
        return int8_product_op(x, weight, scale)
    return int8_linear(x, weight, scale) if x.dtype == torch.float32 else with_pytorch(x, weight, scale)


def with_pytorch(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Computes `int8_product` with PyTorch's operations."""
    return (F.linear(x, weight.to(x.dtype)).float() * scale).to(x.dtype)


def with_triton(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Computes `int8_product` with the Triton kernel."""
    x = x.contiguous()
    (rows, in_features), out_features = x.shape, weight.shape[0]
    product = x.new_empty((rows, out_features))
    block_m = max(16, min(BLOCK_M, triton.next_power_of_2(rows)))  # tl.dot needs at least 16 rows
    block_n = BLOCK_N if out_features >= 128 * BLOCK_N else 16  # small layers: more Triton programs, to use all multiprocessors
    wrap_triton(multiply)[(triton.cdiv(out_features, block_n), triton.cdiv(rows, block_m))](
        x, weight, scale, product, rows, out_features, IN_FEATURES=in_features, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=BLOCK_K if block_m == 16 else BLOCK_K // 4, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return product


int8_product_op = triton_op("language_model::int8_product", with_triton, mutates_args=())
int8_product_op.register_kernel("cpu")(with_pytorch)  # cross-compiling runs the model on the CPU


@int8_product_op.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@triton.jit
def multiply(
    x, weight, scale, product, rows, out_features,
    IN_FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiplies BLOCK_M rows of activations by BLOCK_N rows of weights."""
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask, column_mask = row < rows, column < out_features
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, IN_FEATURES, BLOCK_K):
        at = begin + tl.arange(0, BLOCK_K)
        inside = at < IN_FEATURES
        weights = tl.load(weight + column[None] * IN_FEATURES + at[:, None], mask=column_mask[None] & inside[:, None], other=0)
        activations = tl.load(x + row[:, None] * IN_FEATURES + at[None], mask=row_mask[:, None] & inside[None], other=0.0)
        total += tl.dot(activations, weights.to(activations.dtype), input_precision="ieee")
    total *= tl.load(scale + column, mask=column_mask, other=0.0)[None]
    tl.store(product + row[:, None] * out_features + column[None], total, mask=row_mask[:, None] & column_mask[None])
