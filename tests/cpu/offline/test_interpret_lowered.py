"""Complete models: exported, lowered for a GPU that is not present, assembled, interpreted, and compared with eager PyTorch.

No kernel is compiled: parameter layouts are those of Triton's launcher.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from cgcompile.export.weights import weight_tensors
from cgcompile.offline.assemble.arena import plan
from cgcompile.offline.assemble.block_reader import FORMATS
from cgcompile.offline.compile.kernels import CompiledKernel
from cgcompile.offline.interpret.interpret import Stage, Task, interpret
from cgcompile.offline.lower.inductor import lower_key
from cgcompile.offline.lowered import KernelVariant
from cgcompile.offline.trace import folded_tables
from cgcompile.targets.architectures import arch
from cgcompile.targets.memory_layout import PAD, lay_out
from cgcompile.targets.weights import row_major, shapes_of, write_tables, write_weights
from tests.cpu.offline.written_rows import tensor_of
from tests.helpers.lowered_programs import assembled


class Block(nn.Module):
    """A transformer block with two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(100, 64), nn.Embedding(24, 64)
        self.blocks = nn.Sequential(Block(64), Block(64))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 100, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))))


class Convolutions(nn.Module):
    """Convolutions, a batch norm, pooling and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 24, 3, stride=2)
        self.head = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.silu(self.second(functional.relu(self.norm(self.first(x))))), 2)
        return self.head(x.mean((2, 3))).softmax(-1)


class Narrow(nn.Module):
    """Attention with fewer columns than a product's tile: the product after it reads through a transposition."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.attention(x, x + 1, x)


class Orders(nn.Module):
    """Sorting, scans, reductions with indices, and functions of libdevice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = x.sort(-1)
        return values, places, x.cumsum(-1), x.argmax(-1), x.var(-1), torch.erfinv(x.tanh() * 0.9), x.logsumexp(-1), (x > 1).any(-1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(40, 72), nn.ReLU(), nn.Linear(72, 9)), lambda: torch.randn(5, 40)),
    "gpt": (Gpt, lambda: torch.randint(100, (3, 24))),
    "gpt bf16": (lambda: Gpt().bfloat16(), lambda: torch.randint(100, (3, 24))),
    "convolutions": (Convolutions, lambda: torch.randn(2, 3, 16, 16)),
    "narrow attention": (Narrow, lambda: torch.randn(1, 5, 8)),
    "orders": (Orders, lambda: torch.randn(6, 50)),
}
"""A model, and its inputs."""


@pytest.mark.parametrize("name", list(MODELS))
def test_rows_compute_what_eager_does(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, example = MODELS[name][0]().eval(), MODELS[name][1]()
    program = torch.export.export(model, (example,))
    fresh = MODELS[name][1]()
    with torch.no_grad():
        expected = model(fresh)
    task = task_of(program, example, [fresh], tmp_path)
    (outcome,) = interpret([task], tmp_path, budget=1)
    wanted = expected if isinstance(expected, tuple) else (expected,)
    tolerance = 3e-2 if "bf16" in name else 2e-6
    for contents_, value, want in zip(outcome.read, task.stages[0].read, wanted, strict=True):
        got = tensor_of(contents_, value)
        assert got.dtype == want.dtype and got.shape == want.shape
        assert (got.double() - want.double()).abs().max() <= tolerance * want.double().abs().max()


def task_of(program: torch.export.ExportedProgram, example: torch.Tensor, calls: Sequence[torch.Tensor], folder: Path) -> Task:
    """Lowers the program for `example`, and makes a task that calls it with each of `calls` over the same memory."""
    traced = lower_key(program, (1,), [example], arch("sm_90"))
    compiled = [_laid_out(variant) for variant in traced.variants]
    tensors = weight_tensors(program)
    layout = lay_out(shapes_of(tensors))
    folded, end = folded_tables({(1,): traced}, layout.weights_end)
    offsets = {row.name: row.offset for row in layout.rows} | {name: table.offset for name, table in folded.items()}
    graph = assembled(traced, compiled, plan(traced), offsets, [0])
    path = folder / "weights.safetensors"
    rows = write_weights(path, tensors, layout.rows)
    tables = write_tables(folder / "tables.safetensors", tuple(folded.values()))
    return Task(
        key=(1,),
        stages=tuple(
            [Stage(inputs=((graph.inputs[0], row_major(call)),), recording=graph.recording, read=graph.outputs) for call in calls]
        ),
        variants=tuple(((image.sha256, image.symbol), variant) for image, variant in zip(compiled, traced.variants, strict=True)),
        sizes=(("weights", end), ("inputs", example.numel() * example.element_size() + PAD), ("arena", graph.arena)),
        weights=((path, rows), *([(folder / "tables.safetensors", tables)] if tables else [])),
    )


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
