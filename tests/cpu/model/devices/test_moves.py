"""Device moves in the user's code leave markers; everything else is traced as usual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from cgcompile.export.export import export
from cgcompile.model.devices.markers import TO_DEVICE, TO_HOST
from cgcompile.model.devices.tracking import track_devices
from cgcompile.model.flat_module import run_eager
from cgcompile.model.load import load_source
from cgcompile.model.side_effects import SideEffects
from cgcompile.model.source import sample
from tests.cpu.model.devices.function_model import Model, ids, obstacle, operations, rows, traced


def with_device(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.device("cpu"):
        constant = torch.ones(4)
    return x + constant.cuda()


MOVES: list[tuple[str, Callable[..., Any], list[str]]] = [
    ("to the host and back", lambda m, x: x + (x.cpu() * 2).cuda(), ["to_host", "mul", "to_device", "add"]),
    ("by text", lambda m, x: x + (x.to("cpu") * 2).to("cuda"), ["to_host", "mul", "to_device", "add"]),
    ("by number", lambda m, x: x + (x.cpu() * 2).to(0), ["to_host", "mul", "to_device", "add"]),
    ("by keyword", lambda m, x: x + (x.to(device="cpu") * 2).to(device=x.device), ["to_host", "mul", "to_device", "add"]),
    ("like another", lambda m, x: x + (x.cpu() * 2).to(x), ["to_host", "mul", "to_device", "add"]),
    ("the type of another", lambda m, x: x + (x.cpu() * 2).type_as(x), ["to_host", "mul", "to_device", "add"]),
    ("a module like a tensor", lambda m, x: nn.Hardtanh().to(x)(m.linear.to(x)(x)), ["linear", "hardtanh"]),
    ("like a weight", lambda m, x: x + (x.cpu() * 2).to(m.plain), ["to_host", "mul", "to_device", "add"]),
    ("twice is once", lambda m, x: x.cpu().cpu().to("cpu"), ["to_host"]),
    ("with a dtype there", lambda m, x: x.to("cpu", torch.float16) * 2, ["to", "to_host", "mul"]),
    ("with a dtype back", lambda m, x: x.cpu().to(device="cuda", dtype=torch.float16) * 2, ["to_host", "to_device", "to", "mul"]),
    ("a weight", lambda m, x: x + m.linear.weight.cpu().sum().cuda(), ["to_host", "sum", "to_device", "add"]),
    ("a table looked up on the host", lambda m, i: nn.functional.embedding(i.cpu(), m.table).to(i.device),
        ["to_host", "embedding", "to_device"]),
    ("a factory on the host", lambda m, x: x + torch.ones(4, device="cpu").to(x.device), ["ones", "to_host", "to_device", "add"]),
    ("a factory like a host tensor", lambda m, x: x + torch.ones_like(x.cpu()).cuda(),
        ["to_host", "ones_like", "to_device", "add"]),
    ("a factory back on the GPU", lambda m, x: x + torch.ones_like(x.cpu(), device="cuda"),
        ["to_host", "ones_like", "to_device", "add"]),
    ("under a device", with_device, ["ones", "to_host", "to_device", "add"]),
    ("a number of the host among tensors of the GPU", lambda m, x: x + x.sum().cpu() * 2, ["sum", "to_host", "mul", "add"]),
    ("indices of the host", lambda m, x: x[torch.arange(2, device="cpu")[:1]],
        ["arange", "to_host", "slice", "to_device", "index"]),
    ("a copy into the GPU", lambda m, x: torch.zeros_like(x).copy_(x.cpu()), ["zeros_like", "to_host", "to_device", "copy_"]),
]  # fmt: skip
"""Name, function, and the operations of its program."""

UNMOVED: list[tuple[str, Callable[..., Any], list[str]]] = [
    ("to where it is", lambda m, x: x.to(m.linear.weight.device).cuda().to("cuda:0").to(m.plain) + 1, ["add"]),
    ("a dtype alone", lambda m, x: x.to(torch.float64) + 1, ["to", "add"]),
    ("a dtype where it is", lambda m, x: x.to(x.device, torch.float64) + 1, ["to", "add"]),
    ("a copy where it is", lambda m, x: x.to(x.device, copy=True), ["clone"]),
    ("a factory where another is", lambda m, x: x + torch.ones(4, device=x.device), ["ones", "add"]),
    ("a factory where a weight is", lambda m, x: x + torch.arange(4, device=m.table.device), ["arange", "add"]),
    ("a factory of no device", lambda m, x: x + torch.tensor([1.0, 2, 3, 4]), ["lift_fresh_copy", "detach_", "add"]),
    ("on meta", lambda m, x: x + torch.empty(3, device="meta").shape[0], ["empty", "add"]),
    ("a layer", lambda m, x: m.linear(x) * m.plain, ["linear", "mul"]),
]  # fmt: skip


@pytest.mark.parametrize(("function", "expected"), [case[1:] for case in MOVES], ids=[case[0] for case in MOVES])
def test_moves_leave_markers(function: Callable[..., Any], expected: list[str]) -> None:
    inputs = ids if "embedding" in expected else rows
    exported_model = traced(function, inputs)
    assert operations(exported_model) == expected
    assert exported_model.obstacles == ()
    tensors = sample(exported_model.source, {"batch": 3}).tensors
    (eager,) = run_eager(exported_model.flat, tensors).outputs
    (exported,) = exported_model.programs.first.module()(*tensors)
    torch.testing.assert_close(exported, eager, rtol=0, atol=0)


@pytest.mark.parametrize(("function", "expected"), [case[1:] for case in UNMOVED], ids=[case[0] for case in UNMOVED])
def test_no_move_leaves_none(function: Callable[..., Any], expected: list[str]) -> None:
    exported_model = traced(function)
    assert operations(exported_model) == expected
    assert exported_model.obstacles == ()


def test_the_markers_copy() -> None:
    x = torch.rand(3, 4).t()
    for marker in (TO_HOST, TO_DEVICE):
        y = marker(x)
        assert torch.equal(x, y) and y.stride() == x.stride() and y.data_ptr() != x.data_ptr()


def test_packed_sequences_have_their_sizes_on_the_host() -> None:
    def function(model: Model, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((x.shape[0],), 4).cpu()
        return x + nn.utils.rnn.pack_padded_sequence(x[:, :, None], lengths, batch_first=True).data.sum()

    assert {"to_host", "index"} <= {*operations(traced(function))}


OBSTACLES: list[tuple[str, Callable[..., Any], str]] = [
    ("a mixture", lambda m, x: x + x.cpu(), "several-devices"),
    ("a mixture the other way", lambda m, x: torch.cat([x.cpu(), x]), "several-devices"),
    ("another GPU", lambda m, x: x.cuda(1) + 1, "several-devices"),
    ("another kind", lambda m, x: x.to("xpu") + 1, "several-devices"),
    ("pinned", lambda m, x: x.cpu().pin_memory().cuda(non_blocking=True), "pinned-memory"),
    ("a pinned factory", lambda m, x: x + torch.ones(4, device="cpu", pin_memory=True).cuda(), "pinned-memory"),
]


@pytest.mark.parametrize(("function", "rule"), [case[1:] for case in OBSTACLES], ids=[case[0] for case in OBSTACLES])
def test_obstacles_have_a_place(function: Callable[..., Any], rule: str) -> None:
    assert obstacle(function, __file__) == rule


@pytest.mark.parametrize("layer_class", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_go_through_a_layer_and_back(layer_class: type[nn.Module]) -> None:
    layer, x = layer_class(4, 3, batch_first=True), torch.rand(2, 5, 4)
    with torch.no_grad(), track_devices((x,), SideEffects()) as effects:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3], device="cpu"), batch_first=True)
        filled, lengths = nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)
        devices = [filled.device.type, packed.batch_sizes.device.type, lengths.device.type]
    assert devices == ["cuda", "cpu", "cpu"] and effects.obstacles == []


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.window


def test_a_module_that_forward_makes_goes_where_a_tensor_is() -> None:
    """`torch.nn.Module.to` reads a tensor's device without a call of a torch mode; an example is julius in demucs."""
    exported_model = traced(lambda model, x: Window().to(x)(x))
    assert exported_model.obstacles == () and operations(exported_model) == ["hann_window", "mul"]


@pytest.mark.parametrize(
    "function", [lambda m, x: x.cuda() + 1, lambda m, x: x.to("cuda"), lambda m, x: x + x.new_ones(4, device="cuda")]
)
def test_a_move_to_a_gpu_is_told_where_the_bundle_is_for_the_cpu(function: Callable[..., Any]) -> None:
    source = replace(load_source(Model(function), rows), target_device=torch.device("cpu"))
    (move,) = export(source, {"batch": (1, 8)}).obstacles
    assert move.rule == "moved-to-gpu" and move.where.startswith("tests/cpu/model/devices/test_moves.py:")
