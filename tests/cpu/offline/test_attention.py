"""Attention as one kernel: its results, the strides that it accepts, its shared memory, and which graphs use it."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._higher_order_ops import triton_kernel_wrap

from cgbundle.format import safetensors_files
from cgcompile.offline.assemble.arena import plan
from cgcompile.offline.assemble.block_reader import FORMATS
from cgcompile.offline.compile.kernels import CompiledKernel, finish
from cgcompile.offline.compile.worker import compile_variant
from cgcompile.offline.decompose import attention
from cgcompile.offline.decompose.attention import choose_blocks
from cgcompile.offline.interpret.interpret import Stage, Task, interpret
from cgcompile.offline.lower import inductor
from cgcompile.offline.lower.inductor import lower_key
from cgcompile.offline.lowered import KernelVariant, Launch, Lowered
from cgcompile.targets.architectures import ARCHES, Arch, arch
from cgcompile.targets.memory_layout import PAD, align
from cgcompile.targets.weights import row_major
from tests.cpu.offline.written_rows import tensor_of
from tests.helpers.lowered_programs import assembled
from tests.helpers.raising import raises

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32


class Of(nn.Module):
    """A module that calls a function of its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


class Layer(nn.Module):
    """Self attention as most models write it, optionally with a rotation of queries and keys."""

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


def lowered(model: nn.Module | Callable[..., Any], *tensors: torch.Tensor, target: str = "sm_90") -> Lowered:
    module = model if isinstance(model, nn.Module) else Of(model)
    return lower_key(torch.export.export(module.eval(), tensors), (1,), tensors, arch(target))


def names(traced: Lowered) -> list[str]:
    """Returns the kernel names of all launches, in order."""
    return [traced.variants[event.variant].name for event in traced.events if isinstance(event, Launch)]


def kernels(traced: Lowered) -> list[KernelVariant]:
    return [variant for variant in traced.variants if variant.name == "fused_attention"]


# --- where it is used -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=["float32", "bfloat16"])
def test_a_layer_has_three_kernels(dtype: torch.dtype) -> None:
    """The kernel reads the projection's output in place, and writes the layout that the next product reads."""
    traced = lowered(Layer(128, 2).to(dtype), torch.randn(2, 64, 128, dtype=dtype))
    projection, attention, product = [event for event in traced.events if isinstance(event, Launch)]
    assert names(traced)[1] == "fused_attention" and "addmm" in names(traced)[0] and "addmm" in names(traced)[2]
    query, key, value, mixed = attention.arguments
    assert [(place.buffer, place.offset) for place in (query, key, value)] == [
        (projection.arguments[-1].buffer, offset * 128 * dtype.itemsize) for offset in range(3)
    ]
    assert mixed in product.arguments


def test_torch_analyses_each_kind_of_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    analysed, generate = [], triton_kernel_wrap.generate_ttir
    monkeypatch.setattr(triton_kernel_wrap, "generate_ttir", lambda *arguments: analysed.append(1) or generate(*arguments))
    model, x = nn.Sequential(Layer(128, 2), Layer(128, 2), Layer(128, 4)), torch.randn(2, 64, 128)
    traced = lowered(model, x)
    assert len(analysed) == 2 and names(traced).count("fused_attention") == 3
    monkeypatch.setattr(inductor, "analysed_once", nullcontext)
    assert lowered(model, x) == traced
    assert len(analysed) == 2 + 3 * 3


def test_computed_queries_need_no_copy() -> None:
    traced = lowered(Layer(128, 2, rotated=True), torch.randn(2, 64, 128))
    assert len(names(traced)) <= 5 and not any("clone" in name for name in names(traced))


def test_repeated_keys_are_read_where_they_are() -> None:
    def repeating(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        wide = key.expand(2, 3, 40, 16)
        return F.scaled_dot_product_attention(query, wide, wide, attn_mask=query[..., :1, :1].expand(2, 3, 40, 40))

    traced = lowered(repeating, four(2, 3, 40, 16), torch.randn(2, 1, 40, 16))
    assert names(traced) == ["fused_attention"]
    constants = dict(kernels(traced)[0].constants)
    assert [constants[f"key_stride_{axis}"] for axis in range(4)] == [640, 0, 16, 1]
    assert [constants[f"mask_stride_{axis}"] for axis in range(4)] == [1920, 16, 0, 0]


def attended(*shapes: tuple[int, ...], dtype: torch.dtype = FLOAT) -> Lowered:
    query, key = [torch.randn(*shape).to(dtype) for shape in shapes]
    return lowered(lambda q, k: F.scaled_dot_product_attention(q, k, k), query, key)


@pytest.mark.parametrize(
    ("query", "key", "one"),
    [
        ((1, 2, 15, 16), (1, 2, 15, 16), False),
        ((1, 2, 16, 16), (1, 2, 5, 16), True),
        ((1, 2, 1, 16), (1, 2, 512, 16), True),
        ((1, 2, 1, 16), (1, 2, 513, 16), False),  # one program instance would loop over all columns
        ((1, 66, 1, 16), (1, 66, 513, 16), True),
        ((1, 1, 20, 256), (1, 1, 20, 256), True),
        ((1, 1, 20, 257), (1, 1, 20, 257), False),
    ],
)
def test_where_it_is_used(query: tuple[int, ...], key: tuple[int, ...], one: bool) -> None:
    kernel_names = names(attended(query, key))
    assert (kernel_names == ["fused_attention"]) if one else ("fused_attention" not in kernel_names)


def test_long_ones_that_do_not_fit_are_refused() -> None:
    with raises("operator-without-kernel", match=r"600 by 20 positions, torch.float64, heads 16 wide"):
        attended((1, 1, 600, 16), (1, 1, 20, 16), dtype=torch.float64)
    with raises("operator-without-kernel", match=r"600 by 600 positions, torch.float32, heads 300 wide"):
        attended((1, 1, 600, 300), (1, 1, 600, 300))


def test_other_strides_than_traced_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = attention._stride
    monkeypatch.setattr(attention, "_stride", lambda tensor, axis: honest(tensor, axis) + (axis == 2))
    with raises("lowering-broken", match=r"query has strides \(640, 320, 16, 1\), 17 was expected for axis 2"):
        attended((1, 2, 20, 16), (1, 2, 20, 16))


def test_float32_is_multiplied_as_three_products_of_tf32() -> None:
    tensors = (torch.randn(1, 2, 20, 16),)
    program = torch.export.export(Of(lambda x: F.scaled_dot_product_attention(x, x, x)), tensors)
    (variant,) = lower_key(program, (1,), tensors, arch("sm_90")).variants
    assert variant.source.count('input_precision="tf32x3"') == 2 and "allow_tf32" not in variant.source


def test_equal_each_time() -> None:
    assert attended((1, 2, 40, 32), (1, 2, 70, 32)) == attended((1, 2, 40, 32), (1, 2, 70, 32))


# --- shared memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("width", [64, 256])
def test_fits_into_the_smallest_and_the_newest(width: int, dtype: torch.dtype) -> None:
    """Compiles the block sizes of a large problem with the kind of mask that needs most shared memory."""
    mask = torch.randn(300, 300).to(dtype)
    tensors = [torch.randn(1, 60, 300, width, dtype=dtype) for _ in range(3)]
    for target in ("sm_80", "sm_120"):
        traced = lowered(lambda *operands: F.scaled_dot_product_attention(*operands), *tensors, mask, target=target)
        (variant,) = traced.variants
        assert (dict(variant.constants)["BLOCK_M"] > 16 and variant.stages > 1) or (width, dtype) == (256, FLOAT)
        finish(variant, compile_variant(variant, target), arch(target).shared_optin)


@given(
    st.tuples(st.integers(1, 5000), st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 256), st.integers(1, 256)),
    st.sampled_from([2, 4]),
    st.sampled_from(ARCHES),
)
def test_blocks_fit_and_keep_processors_busy(problem: tuple[int, ...], item: int, target: Arch) -> None:
    heads, rows, columns, width, depth = problem
    blocks = choose_blocks(problem, item, target.multiprocessors, target.shared_optin)
    least = item * (blocks.rows * width + blocks.stages * blocks.columns * (width + depth))
    assert least <= target.shared_optin
    assert blocks.rows == 16 or heads * math.ceil(rows / blocks.rows) >= target.multiprocessors
    assert blocks.rows in (16, 32, 64, 128) and blocks.rows < 2 * max(rows, 16)
    assert blocks.columns in (16, 32, 64) and blocks.columns < 2 * max(columns, 16)
    assert blocks.stages == 1 or columns > blocks.columns


# --- results --------------------------------------------------------------------------------------------------

Case = tuple[tuple[torch.Tensor, ...], dict[str, Any]]
"""Query, key, value, and the mask if there is one; the options of scaled_dot_product_attention."""


def four(batch: int, heads: int, rows: int, width: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    """Returns (batch, heads, rows, width) in the memory layout of a projection: rows outside of heads."""
    return torch.randn(batch, rows, heads, width).transpose(1, 2).to(dtype)


def without(columns: int, *rows: int) -> torch.Tensor:
    """Returns a random mask (columns, columns) in which these rows are fully masked."""
    mask = torch.rand(columns, columns) > 0.4
    mask[list(rows)] = False
    return mask


def cases() -> dict[str, Case]:
    """Returns small cases with lengths that are not multiples of a block, except in the first one."""
    torch.manual_seed(1)
    added = torch.randn(2, 1, 20, 70)
    added[0, :, 3] = -math.inf
    lowest = torch.zeros(1, 1, 70, 70)
    lowest[..., 5, :] = torch.finfo(FLOAT).min  # all columns are equal, as if none were masked
    lowest[..., 6, 30:] = torch.finfo(FLOAT).min
    poisoned = four(1, 2, 40, 16)
    poisoned[0, 1, 7] = math.nan
    infinite = four(1, 2, 40, 16)
    infinite[0, 0, 9, 3] = math.inf
    return {
        "long": (tuple(four(1, 2, 600, 32) for _ in range(3)), {"is_causal": True}),
        "long bf16": (tuple(four(1, 2, 600, 32, BF16) for _ in range(3)), {}),
        "causal": (tuple(torch.randn(3, 2, 4, 77, 24).unbind(0)), {"is_causal": True, "scale": 0.3}),
        "causal, more rows": ((four(2, 2, 90, 32), four(2, 2, 50, 32), four(2, 2, 50, 32)), {"is_causal": True}),
        "causal, more columns": ((four(2, 2, 50, 32), four(2, 2, 90, 32), four(2, 2, 90, 32)), {"is_causal": True}),
        "half": (tuple(four(1, 3, 65, 16, HALF) for _ in range(3)), {"is_causal": True}),
        "kept": ((*(four(2, 2, 70, 48) for _ in range(3)), without(70, 0, 33, 69)), {}),
        "added": ((four(2, 3, 20, 32), four(2, 3, 70, 32), four(2, 3, 70, 32), added), {}),
        "lowest": ((*(four(1, 2, 70, 32) for _ in range(3)), lowest), {}),
        "columns kept": ((*(four(2, 2, 70, 32) for _ in range(3)), torch.rand(2, 1, 1, 70) > 0.3), {}),
        "groups": ((four(2, 6, 40, 32), four(2, 2, 40, 32), four(2, 2, 40, 32)), {"enable_gqa": True}),
        "groups of one": ((four(2, 4, 40, 32), four(2, 1, 40, 32), four(2, 1, 40, 32)), {"enable_gqa": True}),
        "deep": ((four(1, 2, 40, 32), four(1, 2, 40, 32), four(1, 2, 40, 72)), {}),
        "one row": ((four(3, 4, 1, 32), four(3, 4, 130, 32), four(3, 4, 130, 32)), {}),
        "three axes": ((torch.randn(3, 40, 20), torch.randn(3, 50, 20), torch.randn(3, 50, 20), torch.randn(3, 40, 50)), {}),
        "two axes": ((torch.randn(40, 20), torch.randn(50, 20), torch.randn(50, 20)), {}),
        "five axes": ((*(torch.randn(2, 3, 2, 40, 20) for _ in range(3)), torch.rand(3, 1, 40, 40) > 0.3), {}),
        "heads outside": ((torch.randn(40, 2, 3, 16).permute(1, 2, 0, 3), *(four(2, 3, 40, 16) for _ in range(2))), {}),
        "width outside": (tuple(torch.randn(3, 2, 2, 16, 40).transpose(-1, -2).unbind(0)), {}),
        "keys of all": ((four(2, 3, 40, 16), *(torch.randn(1, 1, 40, 16) for _ in range(2))), {}),
        "no numbers": ((poisoned, four(1, 2, 40, 16), four(1, 2, 40, 16)), {"is_causal": True}),
        "infinite": ((infinite, four(1, 2, 40, 16), four(1, 2, 40, 16)), {}),
    }


def test_computes_what_eager_does(tmp_path: Path) -> None:
    """Interprets all cases in one program over poisoned memory; the reference is eager PyTorch in float64."""
    all_cases = cases()
    tensors_given = [tensor for tensors, _ in all_cases.values() for tensor in tensors]

    def model(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        remaining, results = iter(flat), []
        for tensors, options in all_cases.values():
            results.append(F.scaled_dot_product_attention(*[next(remaining) for _ in tensors], **options))
        return tuple(results)

    traced = lowered(model, *tensors_given)
    assert names(traced).count("fused_attention") == len(all_cases)
    outcomes = interpreted(traced, tensors_given, tmp_path)
    for (name, (tensors, options)), got in zip(all_cases.items(), outcomes, strict=True):
        wide = [tensor if tensor.dtype == torch.bool else tensor.double() for tensor in tensors]
        wanted = F.scaled_dot_product_attention(*wide, **options)
        assert got.shape == wanted.shape and got.dtype == tensors[0].dtype, name
        assert torch.equal(got.isnan(), wanted.isnan()), name
        bound = {FLOAT: 2e-6, HALF: 2e-3, BF16: 2e-2}[got.dtype]
        error = (got.double() - wanted).nan_to_num().abs().max()
        assert error <= bound * wanted.nan_to_num().abs().max(), (name, float(error))


def interpreted(traced: Lowered, tensors: Sequence[torch.Tensor], folder: Path) -> list[torch.Tensor]:
    compiled = [_laid_out(variant) for variant in traced.variants]
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end = align(end + tensor.numel() * tensor.element_size())
    graph = assembled(traced, compiled, plan(traced), {}, starts)
    with open(folder / "weights.safetensors", "wb") as file:
        safetensors_files.write(file, {})
    stage_inputs = tuple((value, row_major(tensor)) for value, tensor in zip(graph.inputs, tensors, strict=True))
    task = Task(
        key=(1,),
        stages=(Stage(inputs=stage_inputs, recording=graph.recording, read=graph.outputs),),
        variants=tuple(((image.sha256, image.symbol), variant) for image, variant in zip(compiled, traced.variants, strict=True)),
        sizes=(("weights", PAD), ("inputs", end + PAD), ("arena", graph.arena)),
        weights=((folder / "weights.safetensors", ()),),
    )
    (outcome,) = interpret([task], folder, budget=1)
    return [tensor_of(contents, value) for contents, value in zip(outcome.read, graph.outputs, strict=True)]


def _laid_out(variant: KernelVariant) -> CompiledKernel:
    """Returns a kernel without an image: each parameter aligned to its size, two scratch pointers after them."""
    params = tuple((kind, name) for name, kind in variant.signature if kind != "constexpr")
    layout, end = [], 0
    for size in [*(8 if kind.startswith("*") else struct.calcsize(FORMATS[kind]) for kind, _ in params), 8, 8]:
        layout.append((-(-end // size) * size, size))
        end = sum(layout[-1])
    return CompiledKernel(
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
