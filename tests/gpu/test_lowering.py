"""Exported programs are captured without a second trace: models that Dynamo rejects, and higher-order operators. They launch no
more kernels than torch.compile. Every bundle is right at each of its sizes, on new inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from torch import nn  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgcompile.targets.cuda.lowering import lower, repair  # noqa: E402

SIZES = (2, 5)
WIDTH = 32


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(50, WIDTH, mode="mean"), nn.Linear(WIDTH, 4)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.out(self.bag(index))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, 16, 2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> Any:
        output, (hidden, cell) = self.layer(x)
        return output, hidden.transpose(0, 1), cell.transpose(0, 1)


class Flex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("slope", torch.linspace(0, 1, 2))
        self.seen = create_block_mask(lambda b, h, i, j: i >= j, None, None, 24, 24, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)

        def score(value: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
            return value + self.slope[head] * (column - row)

        return flex_attention(q, k, v, score_mod=score, block_mask=self.seen).transpose(1, 2).flatten(2)


class Loop(nn.Module):
    """A data-dependent loop between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def more(turn: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return turn < 3

        def body(turn: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return turn + 1, torch.tanh(y) * 0.9

        _, y = torch.while_loop(more, body, (torch.zeros((), dtype=torch.int64), self.mix(x)))
        return self.mix(y)


class Together(nn.Module):
    """Independent modules in one program; each takes one input."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return [part(tensor) for part, tensor in zip(self.parts, inputs, strict=True)]


class AllLoop(nn.Module):
    """A model that is only a loop: one host region, no graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.while_loop(lambda t, y: t < 3, lambda t, y: (t + 1, y.tanh()), (torch.zeros((), dtype=torch.int64), x))[1]


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(x)
        return self.mix(torch.cond(y.sum() > 0, lambda y: y.relu(), lambda y: y.sin(), (y,)))


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = self.mix(x)
            with torch.enable_grad():
                y = self.mix(y).softmax(-1)
        return self.mix(y.float())


def vit() -> nn.Module:
    vision = pytest.importorskip("torchvision.models.vision_transformer")
    return vision.VisionTransformer(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=64, mlp_dim=128)


def rows(batch: int) -> torch.Tensor:
    return torch.randn(batch, WIDTH)


def sequence(batch: int) -> torch.Tensor:
    return torch.randn(batch, 24, WIDTH)


def graphs(batch: int) -> tuple[torch.Tensor, ...]:
    bags, images = torch.randint(0, 50, (batch, 6)), torch.randn(batch, 3, 32, 32)
    return bags, images, sequence(batch), sequence(batch), rows(batch)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, ...]]]] = {
    "graphs": (lambda: Together(Bag(), vit(), Recurrent(), Flex(), Modes()), graphs),
    "regions": (lambda: Together(Loop(), Branch()), lambda batch: (rows(batch), rows(batch))),
    "all_loop": (AllLoop, lambda batch: (rows(batch),)),
}
"""Each row is one build: one graph, one with host regions, and one host region."""


@pytest.mark.parametrize("name", list(MODELS))
def test_what_torch_compile_would_trace_again_is_captured(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, draw = MODELS[name]
    model = make().eval()
    sizes = SIZES if name == "graphs" else SIZES[:1]
    built = cgcompile.build(model, draw, sizes=list(sizes), out=tmp_path / f"{name}.cgb", target="cuda")
    model = model.to("cuda")
    for part in model.modules():
        if isinstance(part, Flex):
            part.seen = part.seen.to("cuda")
    torch.manual_seed(7)
    with cgbundle.load(str(built.path)) as program:
        for size in sizes:
            inputs = tuple(t.to("cuda") for t in draw(size))
            with torch.no_grad():
                wanted = model(*inputs)
            got = program(*inputs)
            for mine, its in zip(_flat(got), _flat(wanted), strict=True):
                torch.testing.assert_close(mine, its, rtol=2e-2, atol=1e-2)


def _flat(output: Any) -> list[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else [leaf for element in output for leaf in _flat(element)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(64), nn.LayerNorm(64)
        self.mix, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.first(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def launches(call: Callable[[], Any]) -> list[str]:
    """Returns the kernels that a call launches."""
    with torch.no_grad():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("specialize", ["size", "shared"])
def test_it_launches_no_more_kernels_than_torch_compile(specialize: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)], nn.LayerNorm(64)).eval().cuda()
    x = torch.randn(4, 48, 64, device="cuda")
    with torch.no_grad():
        batch = torch.export.Dim("batch", min=2, max=64)
        exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=False)
        module = repair(exported.module(check_guards=False))
        call = lower(module, "inductor", specialize)
        mine = launches(lambda: call(x))
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=specialize == "shared")
        its = launches(lambda: compiled(x))
        torch.testing.assert_close(call(x)[0], model(x), rtol=2e-3, atol=2e-3)
    assert 0 < len(mine) <= len(its), (mine, its)
