"""Values that Python reads from tensors which depend only on sizes and constants."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cgcompile.export.export import export, refuse_branches
from cgcompile.export.exported import Exported
from cgcompile.export.functionalization import functional
from cgcompile.model.flat_module import run_eager
from cgcompile.model.load import load_source
from cgcompile.model.source import sample
from tests.helpers.raising import raises


class Asking(nn.Module):
    """A function of a module with a buffer and a constant that is not a buffer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.constant = torch.tensor([3, 1])
        self.register_buffer("weight", torch.ones(2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


class Strided(nn.Module):
    """Integer buffers: one in the state dict, one outside of it, and one that counts the calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("stride", torch.tensor(2), persistent=False)
        self.register_buffer("calls", torch.tensor(2), persistent=False)
        self.register_buffer("kept", torch.tensor(2))

    def forward(self, x: torch.Tensor) -> Any:
        output = self.function(self, x)
        self.calls += 1
        return output


def rows(batch: int) -> tuple[torch.Tensor]:
    return (torch.arange(8.0 * batch).view(batch, 8),)


def exported(function: Callable[..., Any], *sizes: int) -> Exported:
    torch.manual_seed(0)
    return export(load_source(Asking(function).eval(), rows if sizes else lambda: rows(3)), {"batch": sizes} if sizes else {})


def distances(m: Asking, x: torch.Tensor) -> torch.Tensor:
    """The limits of a range are elements of another range, as in Funnel."""
    pos = torch.arange(x.shape[1])
    pooled = torch.cat([pos.new_tensor([-1]), pos[1:-1][::2]])
    return x.sum(0) + torch.arange(pooled[0] - pos[0] + 4, pooled[0] - pos[-1] - 1, -2).sum()


def grid(m: Asking, x: torch.Tensor) -> torch.Tensor:
    """The layout of the images is a literal, as in Qwen2-VL."""
    parts = [x.reshape(-1)[: h * w].view(h, w).sum() for _, h, w in torch.tensor([[1, 2, 4], [1, 3, 2]])]
    return torch.stack(parts) * (1 if (m.constant > 0).all() else 2)


def masked(m: Asking, x: torch.Tensor) -> torch.Tensor:
    """A mask of ones selects the patches, as in ViLT."""
    mask = torch.ones(2, 8, dtype=torch.bool, device=x.device)
    heights = mask.long().sum(1).cpu()
    images = [F.interpolate(x[None, None], size=(h // 2, h)) for h in heights]
    index = mask.nonzero()
    rows = [index[index[:, 0] == k] for k in index[:, 0].unique()]
    return torch.cat(images).sum(0)[0, :, rows[0][:, 1]] + x[:1, : heights.max()] + rows[1].size(0)


def filled(m: Asking, x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(x)
    mask[:, 2:5] = 1
    mask = mask.bool() & x.new_ones(x.shape).bool()
    return x * 2 if int(mask.sum()) == 3 * x.shape[0] and mask[0].nonzero()[0] == 2 else x


def limited(m: Asking, x: torch.Tensor) -> torch.Tensor:
    """Values that depend on a declared size."""
    return x * 2 if torch.ones_like(x).sum() > 20 else x


@pytest.mark.parametrize("function", [distances, grid, masked, filled, limited])
@pytest.mark.parametrize("sizes", [(), (1, 3, 8)])
def test_what_no_input_decides_has_a_value(function: Callable[..., Any], sizes: tuple[int, ...]) -> None:
    traced = exported(function, *sizes)
    refuse_branches(traced)
    assert not traced.obstacles
    for key, program in traced.programs.by_key.items():
        functional(program)
        tensors = sample(traced.source, dict(zip(("batch",), key, strict=False))).tensors
        torch.testing.assert_close(program.module()(*tensors), run_eager(traced.flat, tensors).outputs, rtol=0, atol=0)


def test_a_value_that_depends_on_a_size_is_a_matter_of_each() -> None:
    assert not exported(limited, 1, 3, 8).programs.dynamic and exported(distances, 1, 3, 8).programs.dynamic


def assigned(m: Asking, x: torch.Tensor) -> bool:
    z = torch.zeros(4)
    z[1] = x[0, 0]
    return bool(z.sum() > 0)


def through_a_view(m: Asking, x: torch.Tensor) -> bool:
    z = torch.zeros(4)
    view = z[1:]
    z[1] = x[0, 0]
    return bool(view.sum() > 0)


def under_a_view(m: Asking, x: torch.Tensor) -> bool:
    z = torch.zeros(4)
    z[1:].copy_(x[0, :3])
    return bool(z.sum() > 0)


@pytest.mark.parametrize(
    "condition",
    [
        assigned, through_a_view, under_a_view,
        lambda m, x: bool(torch.rand_like(torch.ones(3)).sum() > 1),
        lambda m, x: bool(F.dropout(torch.ones(3), 0.5, True).sum() > 1),
        lambda m, x: bool((torch.ones(8) * x[0]).sum() > 0),
        lambda m, x: bool((m.weight * x[0, 0]).sum() > 0),
        lambda m, x: bool(m.weight.clone().mul_(x[0, 0]).sum() > 0),
        lambda m, x: bool(torch.normal(m.weight, 1.0).sum() > 0),
        lambda m, x: bool(m.weight.clone().uniform_().sum() > 1),
        lambda m, x: bool(torch.empty(3).fill_(x[0, 0]).sum() > 0),
    ],
)  # fmt: skip
def test_what_an_input_or_chance_decides_has_none(condition: Callable[..., bool]) -> None:
    traced = exported(lambda m, x: x * 2 if condition(m, x) else x, 1, 3)
    (asked,) = [obstacle for obstacle in traced.obstacles if obstacle.rule == "path"]
    assert "test_known_values.py" in asked.where


def test_a_mask_that_is_used_without_a_question_stays_an_operation() -> None:
    traced = exported(lambda m, x: x + torch.ones(8, 8).tril()[0], 1, 3)
    assert not traced.programs.weights().keys() - {"model.weight"}


def test_a_program_whose_numbers_are_known_can_be_loaded_again() -> None:
    def chunked(m: Asking, x: torch.Tensor) -> torch.Tensor:
        """The number of chunks is a tensor, as in Longformer."""
        return x.view(x.shape[0], torch.div(x.shape[1], 2, rounding_mode="trunc"), 2).sum(1)

    traced = exported(chunked, 2, 3)
    torch.export.save(traced.programs.first, file := io.BytesIO())
    file.seek(0)
    x = rows(2)[0]
    (output,) = torch.export.load(file).module()(x)
    torch.testing.assert_close(output, chunked(Asking(chunked), x))


def padded(m: Strided, x: torch.Tensor) -> torch.Tensor:
    extra = torch.ceil((x.shape[1] - m.stride + 1) / (m.stride + 1)).to(torch.int64) * m.stride
    return F.pad(x, (0, extra)) * (3 if m.stride > 1 else 1)


def test_integers_that_are_buffers_and_never_change_have_values() -> None:
    traced = export(load_source(Strided(padded), rows), {"batch": (1, 3)})
    assert traced.programs.dynamic and not traced.obstacles
    tensors = sample(traced.source, {"batch": 3}).tensors
    torch.testing.assert_close(traced.programs.first.module()(*tensors), run_eager(traced.flat, tensors).outputs, rtol=0, atol=0)


def test_integers_that_a_call_writes_to_have_none() -> None:
    traced = export(load_source(Strided(lambda m, x: x * 2 if m.calls > 1 else x), rows), {"batch": (1, 3)})
    assert "path" in [obstacle.rule for obstacle in traced.obstacles] and not traced.baked and traced.written == {"calls"}


def test_sizes_by_integers_that_another_entry_writes_to_are_refused() -> None:
    with raises("data-dependent-branch", match="test_known_values.py"):
        refuse_branches(export(load_source(Strided(padded), rows), {"batch": (1, 3)}, alone=False, elsewhere={"stride"}))
