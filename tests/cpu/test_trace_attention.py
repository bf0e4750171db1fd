"""Attention as one kernel: what it computes, which strides it takes, what it fits into, and where it is used."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cgbundle import safetensors
from cgcompile.arch import ARCHES, arch
from cgcompile.record.memory import PAD, align
from cgcompile.record.tensors import row_major
from cgcompile.trace.assembling import assemble
from cgcompile.trace.attention import Blocks, choose
from cgcompile.trace.blocks import FORMATS
from cgcompile.trace.compile_child import compile_variant
from cgcompile.trace.compiling import Compiled, finish
from cgcompile.trace.errors import LoweringBroken, OperationNeedsGpu
from cgcompile.trace.interpreting import Task, interpret
from cgcompile.trace.launches import _check_strides
from cgcompile.trace.lowering import lower_key
from cgcompile.trace.planning import plan
from cgcompile.trace.traced import Launch, Traced, Variant

from .written_rows import tensor_of

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32


class Of(nn.Module):
    """A module that is a function of its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


class Layer(nn.Module):
    """Self attention as most models write it, and with a rotation of queries and keys, as many do."""

    def __init__(self, width: int, heads: int, rotated: bool = False) -> None:
        super().__init__()
        self.heads, self.rotated = heads, rotated
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        query, key, value = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.rotated:
            query, key = query * 0.5 + query.flip(-1), key * 0.5 + key.flip(-1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


def lowered(model: nn.Module | Callable[..., Any], *tensors: torch.Tensor, target: str = "sm_90") -> Traced:
    module = model if isinstance(model, nn.Module) else Of(model)
    return lower_key(torch.export.export(module.eval(), tensors), (1,), tensors, arch(target))


def names(traced: Traced) -> list[str]:
    """The kernels of all launches, in order."""
    return [traced.variants[event.variant].name for event in traced.events if isinstance(event, Launch)]


def kernels(traced: Traced) -> list[Variant]:
    return [variant for variant in traced.variants if variant.name == "fused_attention"]


# --- what it computes -----------------------------------------------------------------------------------------

Case = tuple[tuple[torch.Tensor, ...], dict[str, Any]]
"""Query, key, value, and the mask if there is one; the options of scaled_dot_product_attention."""


def four(batch: int, heads: int, rows: int, width: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    """(batch, heads, rows, width), in memory as a projection leaves it: the rows outside the heads."""
    return torch.randn(batch, rows, heads, width).transpose(1, 2).to(dtype)


def without(columns: int, *rows: int) -> torch.Tensor:
    """A random mask (columns, columns) in which these rows keep nothing."""
    mask = torch.rand(columns, columns) > 0.4
    mask[list(rows)] = False
    return mask


def cases() -> dict[str, Case]:
    """Small ones, with lengths that no block divides, but for the first."""
    torch.manual_seed(1)
    qkv = torch.randn(1, 600, 3, 2, 32).permute(2, 0, 3, 1, 4)
    added = torch.randn(2, 1, 20, 70)
    added[0, :, 3] = -math.inf
    lowest = torch.zeros(1, 1, 70, 70)
    lowest[..., 5, :] = torch.finfo(FLOAT).min  # every column alike: as if none were masked
    lowest[..., 6, 30:] = torch.finfo(FLOAT).min
    poisoned = four(1, 2, 40, 16)
    poisoned[0, 1, 7] = math.nan
    infinite = four(1, 2, 40, 16)
    infinite[0, 0, 9, 3] = math.inf
    return {
        "long": (tuple(qkv.unbind(0)), {"is_causal": True}),
        "long bf16": (tuple(qkv.to(BF16).unbind(0)), {}),
        "causal": (tuple(torch.randn(3, 2, 4, 77, 24).unbind(0)), {"is_causal": True, "scale": 0.3}),
        "causal, more rows": ((four(2, 2, 90, 32), four(2, 2, 50, 32), four(2, 2, 50, 32)), {"is_causal": True}),
        "causal, more columns": ((four(2, 2, 50, 32), four(2, 2, 90, 32), four(2, 2, 90, 32)), {"is_causal": True}),
        "half": (tuple(four(1, 3, 65, 16, HALF) for _ in range(3)), {"is_causal": True}),
        "kept": ((*(four(2, 2, 70, 48) for _ in range(3)), without(70, 0, 33, 69)), {}),
        "added": ((four(2, 3, 20, 32), four(2, 3, 70, 32), four(2, 3, 70, 32), added), {}),
        "lowest": ((*(four(1, 2, 70, 32) for _ in range(3)), lowest), {}),
        "columns masked": ((*(four(2, 2, 70, 32) for _ in range(3)), (torch.rand(2, 1, 1, 70) > 0.3).expand(2, 1, 70, 70)), {}),
        "groups": ((four(2, 6, 40, 32), four(2, 2, 40, 32), four(2, 2, 40, 32)), {"enable_gqa": True}),
        "groups of one": ((four(2, 4, 40, 32), four(2, 1, 40, 32), four(2, 1, 40, 32)), {"enable_gqa": True}),
        "deep": ((four(1, 2, 40, 32), four(1, 2, 40, 32), four(1, 2, 40, 72)), {}),
        "one row": ((four(3, 4, 1, 32), four(3, 4, 130, 32), four(3, 4, 130, 32)), {}),
        "three axes": ((torch.randn(3, 40, 20), torch.randn(3, 50, 20), torch.randn(3, 50, 20), torch.randn(3, 40, 50)), {}),
        "two axes": ((torch.randn(40, 20), torch.randn(50, 20), torch.randn(50, 20)), {}),
        "five axes": ((*(torch.randn(2, 3, 2, 40, 20) for _ in range(3)), torch.rand(3, 1, 40, 40) > 0.3), {}),
        "heads outside": ((torch.randn(40, 2, 3, 16).permute(1, 2, 0, 3), *(four(2, 3, 40, 16) for _ in range(2))), {}),
        "width outside": (tuple(torch.randn(3, 2, 2, 16, 40).transpose(-1, -2).unbind(0)), {}),
        "keys repeat": ((four(2, 3, 40, 16), *(torch.randn(1, 1, 40, 16).expand(2, 3, 40, 16) for _ in range(2))), {}),
        "no numbers": ((poisoned, four(1, 2, 40, 16), four(1, 2, 40, 16)), {"is_causal": True}),
        "infinite": ((infinite, four(1, 2, 40, 16), four(1, 2, 40, 16)), {}),
    }


def test_computes_what_eager_does(tmp_path: Path) -> None:
    """All cases in one program, interpreted over poisoned memory; eager in float64, where torch takes scores in memory."""
    all_cases = cases()
    given = [tensor for tensors, _ in all_cases.values() for tensor in tensors]

    def model(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        remaining, results = iter(flat), []
        for tensors, options in all_cases.values():
            results.append(F.scaled_dot_product_attention(*[next(remaining) for _ in tensors], **options))
        return tuple(results)

    traced = lowered(model, *given)
    assert names(traced).count("fused_attention") == len(all_cases)
    outcomes = interpreted(traced, given, tmp_path)
    for (name, (tensors, options)), got in zip(all_cases.items(), outcomes, strict=True):
        wide = [tensor if tensor.dtype == torch.bool else tensor.double() for tensor in tensors]
        wanted = F.scaled_dot_product_attention(*wide, **options)
        assert got.shape == wanted.shape and got.dtype == tensors[0].dtype, name
        assert torch.equal(got.isnan(), wanted.isnan()), name
        bound = {FLOAT: 2e-6, HALF: 2e-3, BF16: 2e-2}[got.dtype]
        error = (got.double() - wanted).nan_to_num().abs().max()
        assert error <= bound * wanted.nan_to_num().abs().max(), (name, float(error))


def interpreted(traced: Traced, given: Sequence[torch.Tensor], folder: Path) -> list[torch.Tensor]:
    compiled = [_laid_out(variant) for variant in traced.variants]
    starts, end = [], 0
    for tensor in given:
        starts.append(end)
        end = align(end + tensor.numel() * tensor.element_size())
    graph = assemble(traced, compiled, plan(traced), {}, starts)
    with open(folder / "weights.safetensors", "wb") as file:
        safetensors.write(file, {})
    task = Task(
        key=(1,),
        recording=graph.recording,
        variants=tuple(((image.sha256, image.symbol), variant) for image, variant in zip(compiled, traced.variants, strict=True)),
        sizes=(("weights", PAD), ("inputs", end + PAD), ("arena", graph.arena)),
        weights=folder / "weights.safetensors",
        placed=(),
        inputs=tuple((value, row_major(tensor)) for value, tensor in zip(graph.inputs, given, strict=True)),
        outputs=graph.outputs,
    )
    (outcome,) = interpret([task], folder, budget=1)
    return [tensor_of(contents, value) for contents, value in zip(outcome.outputs, task.outputs, strict=True)]


def _laid_out(variant: Variant) -> Compiled:
    """A kernel without an image: each parameter aligned to its size, two scratch pointers behind them."""
    params = tuple((kind, name) for name, kind in variant.signature if kind != "constexpr")
    layout, end = [], 0
    for size in [*(8 if kind.startswith("*") else struct.calcsize(FORMATS[kind]) for kind, _ in params), 8, 8]:
        layout.append((-(-end // size) * size, size))
        end = sum(layout[-1])
    return Compiled(
        image=b"",
        sha256=hashlib.sha256(repr(variant).encode()).hexdigest(),
        symbol=variant.name,
        params=params,
        layout=tuple(layout),
        scratch_pointers=2,
        shared=0,
        threads=32 * variant.warps,
        cluster=(1, 1, 1),
        cooperative=False,
    )
