"""Attention of one row in one kernel: which graphs use it, and its results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the kernel is Triton's")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import cgcompile  # noqa: E402
from cgcompile.offline.trace import KERNELS  # noqa: E402
from cgcompile.targets.cuda.inductor import _decompositions  # noqa: E402
from cgcompile.transforms.few_rows.attention import attend_at_once  # noqa: E402
from cgcompile.transforms.few_rows.attention_text import MOST  # noqa: E402

HEADS, PLACES, WIDTH = 4, 24, 16


def random_tensor(*shape: int) -> Any:
    return torch.randn(shape)


def causal(x: Any, place: Any) -> Any:
    scores = (x.view(1, HEADS, 1, WIDTH) @ random_tensor(1, HEADS, PLACES, WIDTH).transpose(-2, -1)) / 4
    scores = scores.masked_fill(torch.arange(PLACES) > place, float("-inf"))
    return (torch.softmax(scores, -1) @ random_tensor(1, HEADS, PLACES, WIDTH)).view(1, -1)


def shared_heads(x: Any, place: Any) -> Any:
    """Two heads share one key."""
    keys, values = [
        random_tensor(1, HEADS // 2, PLACES, WIDTH)[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, HEADS, PLACES, WIDTH)
        for _ in range(2)
    ]
    scores = x.view(1, HEADS, 1, WIDTH) @ keys.transpose(-2, -1) + torch.where(torch.arange(PLACES) > place, -1e9, 0.0)
    return torch.softmax(scores, -1) @ values


def of_many_places(x: Any, place: Any) -> Any:
    places = MOST // WIDTH + 1
    keys, values = random_tensor(1, HEADS, places, WIDTH), random_tensor(1, HEADS, places, WIDTH)
    return torch.softmax(x.view(1, HEADS, 1, WIDTH) @ keys.transpose(-2, -1), -1) @ values


def of_two_rows(x: Any, place: Any) -> Any:
    keys, values = random_tensor(1, HEADS // 2, PLACES, WIDTH), random_tensor(1, HEADS // 2, PLACES, WIDTH)
    return torch.softmax(x.view(1, HEADS // 2, 2, WIDTH) @ keys.transpose(-2, -1), -1) @ values


def unknown(x: Any, place: Any) -> Any:
    keys, values = random_tensor(1, HEADS, PLACES, WIDTH), random_tensor(1, HEADS, PLACES, WIDTH)
    return torch.softmax(torch.erfinv((x.view(1, HEADS, 1, WIDTH) @ keys.transpose(-2, -1)).tanh()), -1) @ values


def a_product_alone(x: Any, place: Any) -> Any:
    return torch.softmax(x.view(HEADS, 1, WIDTH), -1) @ random_tensor(HEADS, WIDTH, PLACES)


def a_perceptron(x: Any, place: Any) -> Any:
    return torch.relu(x @ random_tensor(HEADS * WIDTH, PLACES)) @ random_tensor(PLACES, WIDTH)


@pytest.mark.parametrize(
    ("call", "kernels"),
    [(causal, 1), (shared_heads, 1), (of_many_places, 0), (of_two_rows, 0), (unknown, 0), (a_product_alone, 0), (a_perceptron, 0)],
)
def test_graphs_that_get_the_kernel(call: Callable[[Any, Any], Any], kernels: int) -> None:
    graph = make_fx(call, _decompositions())(torch.randn(1, HEADS * WIDTH), torch.tensor(3)).graph
    for node in graph.nodes:
        node.meta.setdefault("val", None)
    attend_at_once(graph, ahead=True)
    assert sum("triton_kernel" in str(node.target) for node in graph.nodes) == kernels


MODEL = """
import torch
from torch import nn

HEADS, SHARED, PLACES, WIDTH = 4, {shared}, 24, 16

class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, (HEADS + 2 * SHARED) * WIDTH), nn.Linear(64, 64)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(1, SHARED, PLACES, WIDTH).to({dtype}))
        self.to({dtype})

    def forward(self, x, place):
        query, key, value = self.qkv(x).view(1, -1, 1, WIDTH).split((HEADS, SHARED, SHARED), 1)
        keys, values = self.keys.index_copy(2, place, key), self.values.index_copy(2, place, value)
        self.keys.copy_(keys), self.values.copy_(values)
        if SHARED < HEADS:
            keys, values = [
                each[:, :, None].expand(-1, -1, HEADS // SHARED, -1, -1).reshape(1, HEADS, PLACES, WIDTH) for each in (keys, values)
            ]
        later = torch.arange(PLACES, device=x.device) > place
        scores = (query @ keys.transpose(-2, -1)).float() / 4
        mixed = torch.softmax(scores.masked_fill(later, float("-inf")), -1).to(x.dtype) @ values
        return self.out(mixed.view(1, -1))

def model():
    torch.manual_seed(0)
    return Step().eval()

def inputs():
    return torch.randn(1, 64).to({dtype}), torch.tensor([7])
"""


@pytest.mark.parametrize(("shared", "dtype"), [(4, "torch.float32"), (2, "torch.bfloat16")])
def test_a_step_with_a_cache_is_one_kernel_with_what_eager_computes(shared: int, dtype: str, tmp_path: Path) -> None:
    """A build publishes a bundle only if its interpreted kernels give the outputs and the state of eager PyTorch."""
    file = tmp_path / "step.py"
    file.write_text(MODEL.format(shared=shared, dtype=dtype))
    built = cgcompile.build(str(file), out=tmp_path / "step.cgb", target="sm_90")
    assert [proof.method for proof in built.manifest.entries[0].self_test.proofs] == ["interpret"]
    symbols = [row["symbol"] for row in json.loads((tmp_path / "step.cgb" / KERNELS).read_text())]
    assert "attention" in symbols and len(symbols) == 3
