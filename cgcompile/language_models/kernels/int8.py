"""Weights of linear layers in 8 bits, with a scale for each row: half the bytes of bfloat16, and bytes are what a token costs.

    weight[row] = scale[row] * eight_bits[row], with scale[row] = max |weight[row]| / 127

Activations stay as they are.  A Triton kernel for GPUs reads the bytes once for up to ROWS rows of activations and multiplies in
the dtype of these; elsewhere PyTorch's operations do the same.
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

ROWS = 64
"""Rows of activations that a program multiplies at most."""

COLUMNS, DEPTH, WARPS, STAGES = 32, 256, 4, 4
"""Rows of weights that a program reads, how much of them at a time where there are few rows of activations (else a quarter, for the
sake of shared memory), and how Triton compiles it."""


class Int8Linear(nn.Module):
    """A linear layer over eight-bit weights: `weight` int8 (out, in), `scale` float32 (out,), `bias` (out,) or None."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        product = int8_product(x.flatten(0, -2), self.weight, self.scale).unflatten(0, x.shape[:-1])
        return product if self.bias is None else product + self.bias


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (out, in) in eight bits, and the scale of each row."""
    whole = weight.detach().float()
    scale = (whole.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (whole / scale[:, None]).round().to(torch.int8), scale


def int8_weights(network: nn.Module) -> nn.Module:
    """The model with all of its linear layers over eight-bit weights, embeddings and experts as they are.  A head that shares its
    weights with the embeddings gets its own."""
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.Linear | Conv1D):
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            parent, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(parent), leaf, Int8Linear(*rounded(weight), module.bias))
    return network


def int8_product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x (rows, in), weight int8 (out, in), scale float32 (out,) -> (rows, out) in the dtype of `x`."""
    if x.device.type != "cpu":
        return launch(x, weight, scale)
    return int8_linear(x, weight, scale) if x.dtype == torch.float32 else plain(x, weight, scale)


def plain(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The same with PyTorch's operations."""
    return (F.linear(x, weight.to(x.dtype)).float() * scale).to(x.dtype)


def by_kernel(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`int8_product` by a kernel."""
    x = x.contiguous()
    (rows, depth), count = x.shape, weight.shape[0]
    product = x.new_empty((rows, count))
    block = max(16, min(ROWS, triton.next_power_of_2(rows)))  # tl.dot takes no fewer
    columns = COLUMNS if count >= 128 * COLUMNS else 16  # enough programs for all multiprocessors
    wrap_triton(multiply)[(triton.cdiv(count, columns), triton.cdiv(rows, block))](
        x, weight, scale, product, rows, count, DEPTH_IN_ALL=depth, ROWS=block, COLUMNS=columns,
        DEPTH=DEPTH if block == 16 else DEPTH // 4, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return product


launch = triton_op("language_model::int8_product", by_kernel, mutates_args=())
launch.register_kernel("cpu")(plain)  # what cross-compiling runs the model with


@launch.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@triton.jit
def multiply(
    x, weight, scale, product, rows, count,
    DEPTH_IN_ALL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """ROWS rows of activations times COLUMNS rows of weights."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, DEPTH_IN_ALL, DEPTH):
        at = begin + tl.arange(0, DEPTH)
        inside = at < DEPTH_IN_ALL
        eight = tl.load(weight + column[None] * DEPTH_IN_ALL + at[:, None], mask=(column < count)[None] & inside[:, None], other=0)
        activations = tl.load(x + row[:, None] * DEPTH_IN_ALL + at[None], mask=(row < rows)[:, None] & inside[None], other=0.0)
        total += tl.dot(activations, eight.to(activations.dtype), input_precision="ieee")
    total *= tl.load(scale + column, mask=column < count, other=0.0)[None]
    tl.store(product + row[:, None] * count + column[None], total, mask=(row < rows)[:, None] & (column < count)[None])
