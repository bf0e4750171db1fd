"""8-bit weights of linear layers, with a scale for each row: half the bytes of bfloat16, because memory traffic limits decoding.

    weight[row] = scale[row] * eight_bits[row], with scale[row] = max |weight[row]| / 127

Activations keep their dtype.  On a GPU a Triton kernel reads the weights once for up to ROWS rows of activations, and multiplies in
the activations' dtype; elsewhere PyTorch's operations do the same.
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
"""Maximum rows of activations of a program."""

COLUMNS, DEPTH, WARPS, STAGES = 32, 256, 4, 4
"""Rows of weights of a program, the elements of a row that it reads at a time for few activations (else a quarter, because of
shared memory), and Triton's options."""


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


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes weights (out, in) to 8 bits, and returns them with the scale of each row."""
    values = weight.detach().float()
    scale = (values.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (values / scale[:, None]).round().to(torch.int8), scale


def int8_weights(network: nn.Module) -> nn.Module:
    """Replaces all linear layers by layers with 8-bit weights, but not embeddings and experts.  A head that shares its weights with
    the embeddings gets its own copy."""
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
    """`int8_product` with PyTorch's operations."""
    return (F.linear(x, weight.to(x.dtype)).float() * scale).to(x.dtype)


def by_kernel(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`int8_product` with a kernel."""
    x = x.contiguous()
    (rows, depth), count = x.shape, weight.shape[0]
    product = x.new_empty((rows, count))
    block = max(16, min(ROWS, triton.next_power_of_2(rows)))  # minimum of tl.dot
    columns = COLUMNS if count >= 128 * COLUMNS else 16  # enough programs for all multiprocessors
    wrap_triton(multiply)[(triton.cdiv(count, columns), triton.cdiv(rows, block))](
        x, weight, scale, product, rows, count, DEPTH_IN_ALL=depth, ROWS=block, COLUMNS=columns,
        DEPTH=DEPTH if block == 16 else DEPTH // 4, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return product


launch = triton_op("language_model::int8_product", by_kernel, mutates_args=())
launch.register_kernel("cpu")(plain)  # cross-compiling runs the model on the CPU


@launch.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@triton.jit
def multiply(
    x, weight, scale, product, rows, count,
    DEPTH_IN_ALL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Multiplies ROWS rows of activations by COLUMNS rows of weights."""
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
