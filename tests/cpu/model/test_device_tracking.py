"""Moves that the user's code asks for leave markers, virtual devices are answered, and everything else is traced as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from cgcompile.export.export import export, refuse_branches
from cgcompile.export.exported import Exported
from cgcompile.model import flat_module as flat
from cgcompile.model.devices.markers import TO_DEVICE, TO_HOST
from cgcompile.model.devices.tracking import DeviceTracking, track_devices
from cgcompile.model.flat_module import run_eager
from cgcompile.model.load import load_source
from cgcompile.model.side_effects import SideEffects
from cgcompile.model.source import sample
from tests.cpu.models import Everything, Image, everything_inputs, image_inputs
from tests.helpers.raising import raises


class Model(nn.Module):
    """A function of a (batch, 4) tensor and of this module, which holds a weight, a buffer and a plain tensor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)
            self.register_buffer("table", torch.rand(10, 4))
            self.plain = torch.rand(4)
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(self, *tensors)


def rows(batch: int) -> torch.Tensor:
    return torch.rand(batch, 4)


def ids(batch: int) -> torch.Tensor:
    return torch.randint(0, 10, (batch,))


def traced(function: Callable[..., Any], inputs: Callable[..., Any] = rows) -> Exported:
    return export(load_source(Model(function), inputs), {"batch": (1, 8)})


def operations(made: Exported) -> list[str]:
    """The operations of the program by short names, assertions left out."""
    calls = [node.target for node in made.programs.first.graph.nodes if node.op == "call_function"]
    names = [str(target).split(".")[1] for target in calls if isinstance(target, torch._ops.OpOverload)]
    return [name for name in names if not name.startswith("_assert")]


# --- markers ------------------------------------------------------------------------------------------------------


def with_device(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.device("cpu"):
        made = torch.ones(4)
    return x + made.cuda()


MOVES: list[tuple[str, Callable[..., Any], list[str]]] = [
    ("to the host and back", lambda m, x: x + (x.cpu() * 2).cuda(), ["to_host", "mul", "to_device", "add"]),
    ("by text", lambda m, x: x + (x.to("cpu") * 2).to("cuda"), ["to_host", "mul", "to_device", "add"]),
    ("by number", lambda m, x: x + (x.cpu() * 2).to(0), ["to_host", "mul", "to_device", "add"]),
    ("by keyword", lambda m, x: x + (x.to(device="cpu") * 2).to(device=x.device), ["to_host", "mul", "to_device", "add"]),
    ("like another", lambda m, x: x + (x.cpu() * 2).to(x), ["to_host", "mul", "to_device", "add"]),
    ("the type of another", lambda m, x: x + (x.cpu() * 2).type_as(x), ["to_host", "mul", "to_device", "add"]),
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
"""What, a function, and the operations that it leaves."""

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
    made = traced(function, inputs)
    assert operations(made) == expected
    assert made.obstacles == ()
    tensors = sample(made.source, {"batch": 3}).tensors
    (eager,) = run_eager(made.flat, tensors).outputs
    (exported,) = made.programs.first.module()(*tensors)
    torch.testing.assert_close(exported, eager, rtol=0, atol=0)


@pytest.mark.parametrize(("function", "expected"), [case[1:] for case in UNMOVED], ids=[case[0] for case in UNMOVED])
def test_no_move_leaves_none(function: Callable[..., Any], expected: list[str]) -> None:
    made = traced(function)
    assert operations(made) == expected
    assert made.obstacles == ()


@contextmanager
def without(*arguments: Any) -> Iterator[SideEffects]:
    """In the place of `track_devices`: no mode at all."""
    yield SideEffects()


@pytest.mark.parametrize(
    ("model", "inputs", "sizes"),
    [
        (Everything(), everything_inputs, {"batch": (1, 8)}),
        (Image(), image_inputs, {"batch": (1, 2), "side": (8, 16)}),
        (nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(), lambda batch: torch.rand(batch, 5, 8), {"batch": (2, 8)}),
        (nn.LSTM(4, 6, batch_first=True).eval(), lambda batch: torch.rand(batch, 5, 4), {"batch": (2, 8)}),
    ],
    ids=["everything", "image", "transformer", "lstm"],
)
def test_a_model_that_names_no_device_has_the_graph_it_has_without_the_mode(
    model: nn.Module, inputs: Any, sizes: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_mode = export(load_source(model, inputs), sizes)
    monkeypatch.setattr(flat, "track_devices", without)
    assert str(with_mode.programs.first.graph) == str(export(load_source(model, inputs), sizes).programs.first.graph)


def test_the_markers_copy() -> None:
    x = torch.rand(3, 4).t()
    for marker in (TO_HOST, TO_DEVICE):
        y = marker(x)
        assert torch.equal(x, y) and y.stride() == x.stride() and y.data_ptr() != x.data_ptr()


# --- answers ------------------------------------------------------------------------------------------------------


def answers(model: Model, x: torch.Tensor) -> torch.Tensor:
    host = x.cpu()
    assert x.is_cuda and not x.is_cpu and x.device == torch.device("cuda:0") and x.get_device() == 0
    assert host.is_cpu and not host.is_cuda and host.device == torch.device("cpu") and host.get_device() == -1
    assert (x * 2).device == model.plain.device == model.linear.weight.device == torch.device("cuda:0")
    assert (host * 2).device == (host + model.plain).device == torch.zeros(2, device="cpu").device == torch.device("cpu")
    assert host[0].device.type == "cpu" and host.view(-1).device.type == "cpu" and host.cuda().device.type == "cuda"
    assert host.mul_(2).device.type == "cpu" and [each.device.type for each in host.unbind(1)] == ["cpu"] * 4
    return x * 2


def test_devices_are_answered_alike_in_eager_pytorch_and_in_a_trace() -> None:
    assert operations(traced(answers))[-1] == "mul"


def test_autocast_for_the_device_of_a_tensor_touches_its_tensors() -> None:
    def function(model: Model, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return model.linear(x)

    made = traced(function)
    (node,) = [node for node in made.programs.first.graph.nodes if node.op == "output"]
    assert node.args[0][0].meta["val"].dtype is torch.bfloat16


def test_nothing_stays_replaced() -> None:
    device, autocast = FakeTensor.__dict__["device"], torch.autocast.__init__
    with raises("eager-failed", match="boom"):
        traced(lambda m, x: (_ for _ in ()).throw(ValueError("boom")))
    assert FakeTensor.__dict__["device"] is device and torch.autocast.__init__ is autocast
    assert torch.overrides._get_current_function_mode_stack() == []


def test_packed_sequences_have_their_sizes_on_the_host() -> None:
    def function(model: Model, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((x.shape[0],), 4).cpu()
        return x + nn.utils.rnn.pack_padded_sequence(x[:, :, None], lengths, batch_first=True).data.sum()

    assert "_pack_padded_sequence" in operations(traced(function))


# --- obstacles ----------------------------------------------------------------------------------------------------

OBSTACLES: list[tuple[str, Callable[..., Any], str]] = [
    ("a mixture", lambda m, x: x + x.cpu(), "several-devices"),
    ("a mixture the other way", lambda m, x: torch.cat([x.cpu(), x]), "several-devices"),
    ("another GPU", lambda m, x: x.cuda(1) + 1, "several-devices"),
    ("another kind", lambda m, x: x.to("xpu") + 1, "several-devices"),
    ("pinned", lambda m, x: x.cpu().pin_memory().cuda(non_blocking=True), "pinned-memory"),
    ("a pinned factory", lambda m, x: x + torch.ones(4, device="cpu", pin_memory=True).cuda(), "pinned-memory"),
    ("an if", lambda m, x: x + 1 if x.sum() > 0 else x - 1, "data-dependent-branch"),
    ("an if on a number", lambda m, x: x + 1 if x.sum().item() > 0 else x - 1, "data-dependent-branch"),
    ("equal", lambda m, x: x + 1 if torch.equal(x, x) else x - 1, "data-dependent-branch"),
    ("int of a float", lambda m, x: x * int(x.sum()), "data-dependent-branch"),
]


@pytest.mark.parametrize(("function", "rule"), [case[1:] for case in OBSTACLES], ids=[case[0] for case in OBSTACLES])
def test_obstacles_have_a_place(function: Callable[..., Any], rule: str) -> None:
    (obstacle,) = traced(function).obstacles
    assert obstacle.rule == rule
    file, _, line = obstacle.where.rpartition(":")
    assert file.endswith("test_device_tracking.py")
    with open(__file__) as text:
        assert text.readlines()[int(line) - 1].strip() == obstacle.source


def branches(model: Model, x: torch.Tensor) -> torch.Tensor:
    if x.sum() < 0:
        x = x.sin()
    while x.sum() < 100:
        x = x * 2 + 1
    if x.max().item() > 0:
        x = x.cos()
    return x * x.min().item()


def test_a_trace_branches_as_the_inputs_did_and_sees_what_comes_after() -> None:
    made = traced(branches)
    found = operations(made)
    assert "sin" not in found and "cos" in found and "mul" in found
    assert found.count("item") == 1, "the number that decides a branch is gone, the other is there"
    assert len({obstacle.where for obstacle in made.obstacles}) == 3


def test_a_loop_that_the_inputs_did_not_enter_ends() -> None:
    def function(model: Model, x: torch.Tensor) -> torch.Tensor:
        while not torch.allclose(x, x):
            x = x + 1
        return x * 2

    assert operations(traced(function))[-1] == "mul"


@pytest.mark.parametrize("function", [branches, OBSTACLES[6][1], OBSTACLES[7][1]])
def test_nothing_is_built_from_one_branch_of_several(function: Callable[..., Any]) -> None:
    with raises("branch-on-data", match=r"test_device_tracking.py:\d+: data-dependent-branch: ") as caught:
        refuse_branches(export(load_source(Model(function), rows), {"batch": (1, 8)}))
    assert "\n" not in str(caught.value) and "torch.where" in caught.value.hint


@pytest.mark.parametrize(
    "condition", [lambda m, x: x.shape[0] > 3, lambda m, x: m.training, lambda m, x: bool(torch.tensor(1) > 0)]
)
def test_what_no_input_decides_is_no_branch_on_data(condition: Callable[..., bool]) -> None:
    made = export(load_source(Model(lambda m, x: x + 1 if condition(m, x) else x - 1), rows), {"batch": (4, 8)})
    assert made.obstacles == ()


def helper(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def test_an_operation_has_the_innermost_line_of_the_users() -> None:
    from cgcompile.model.user_code import place

    nodes = traced(lambda m, x: helper(x)).programs.first.graph.nodes
    (node,) = [node for node in nodes if node.target is torch.ops.aten.sin.default]
    assert place(node)[1] == "return x.sin()"


def test_states_of_an_lstm_have_the_shapes_of_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 traces an extra axis on a GPU."""
    call = DeviceTracking._call
    monkeypatch.setattr(DeviceTracking, "_call", lambda *args: _with_an_axis(args[1], call(*args)))
    net, x = torch.nn.LSTM(3, 5, num_layers=2, bidirectional=True), torch.randn(7, 2, 3)
    with track_devices([x], SideEffects()), torch.no_grad():
        output, (hidden, cell) = net(x)
    want, (first, second) = net(x)
    assert hidden.shape == cell.shape == (4, 2, 5)
    for got, wanted in ((output, want), (hidden, first), (cell, second)):
        torch.testing.assert_close(got, wanted)


def _with_an_axis(func: object, result: Any) -> Any:
    return (result[0], result[1][:, None], result[2][:, None]) if func == torch._VF.lstm else result
