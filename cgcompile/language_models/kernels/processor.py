"""Operators that language models use on CPUs.

Bundles call C++ functions (targets/kernels/operators.cpp).  Eager PyTorch runs the functions below, in double precision: bundles
are compared with eager PyTorch, and deep models amplify the rounding errors of both.  All float tensors are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import prefill


@torch.library.custom_op("language_model::int8_linear", mutates_args=(), device_types="cpu")
def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x (rows, in), weight int8 (out, in), scale (out,) -> (rows, out)."""
    return (F.linear(x.double(), weight.double()) * scale).float()


@int8_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("language_model::paged_attention", mutates_args=(), device_types="cpu")
def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, start: Tensor, count: Tensor, sinks: Tensor | None,
    scale: float, window: int, chunk: int, softcap: float, checked: int = 0,
) -> Tensor:  # fmt: skip
    """Computes `paged_prefill`, with zeros after the first `count` tokens of a lane.  The C++ function reads only the visible
    pages.  `checked`: 1 if the caller has checked that `pages` are rows of `keys`, whose number a load may choose."""
    wide = query.double(), keys.double(), values.double()
    mixed = prefill.with_pytorch(*wide, pages, start, count, sinks, scale, window, chunk, softcap).float()
    used = torch.arange(query.shape[1], device=query.device) < count[:, None]
    return torch.where(used[..., None, None], mixed, 0.0).contiguous()


@paged_attention.register_fake
def _(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, start: Tensor, count: Tensor, sinks: Tensor | None,
    scale: float, window: int, chunk: int, softcap: float, checked: int = 0,
) -> Tensor:  # fmt: skip
    return query.new_empty(query.shape)
