"""The user's code sees virtual devices; a model that does not read devices has the same graph as without them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from cgcompile.export.export import export
from cgcompile.export.torch_export import export_static
from cgcompile.model import flat_module as flat
from cgcompile.model.devices import operations as tracked
from cgcompile.model.devices.tensor_places import CPU
from cgcompile.model.devices.tracking import track_devices
from cgcompile.model.load import load_source
from cgcompile.model.side_effects import SideEffects
from cgcompile.model.source import CUDA, sample
from tests.cpu.model.devices.function_model import Model, operations, traced
from tests.cpu.models import Everything, Image, everything_inputs, image_inputs
from tests.helpers.raising import raises


@contextmanager
def without(*arguments: Any) -> Iterator[SideEffects]:
    """Replaces `track_devices`; enters no torch mode."""
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
    plain = export(load_source(model, inputs), sizes)
    if isinstance(model, nn.LSTM) and torch.__version__ < "2.12":  # its states have an additional axis and get a view
        assert [name for name in operations(with_mode) if name not in ("view", "sym_size")] == [
            name for name in operations(plain) if name != "sym_size"
        ]
    else:
        assert str(with_mode.programs.first.graph) == str(plain.programs.first.graph)


class Copies(nn.Module):
    """Copies a submodule, its input and a buffer, and changes the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        net, state = copy.deepcopy((self.net, {"x": x, "again": x, "scale": self.scale}))
        state["x"] += 1
        state["scale"].mul_(2)
        result: torch.Tensor = net(state["again"]) * state["scale"] + x + self.scale
        return result


class SharedCopies(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, flat_view = copy.deepcopy((x, x.view(-1)))
        one += 1
        return flat_view.view(-1, 4)  # type: ignore[no-any-return]


def test_copies_of_traced_tensors_have_memory_of_their_own() -> None:
    model, rows = Copies().eval(), lambda batch: torch.rand(batch, 4)
    programs = export(load_source(model, rows), {"batch": (1, 8)}).programs
    x = torch.rand(5, 4)
    assert programs.dynamic
    torch.testing.assert_close(programs.first.module()(x)[0], model(x))
    with raises("export-differs", match=r"test_tracking.py:\d+: .* share memory: copy them with clone"):
        export(load_source(SharedCopies(), rows), {"batch": (1, 8)})


class Flattening(nn.Module):
    """Calls flatten_parameters() in every call, as many recurrent models do."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 6, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gru.flatten_parameters()
        return self.gru(x)[0]


def test_flattened_parameters_start_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def acceptable(tensor: torch.Tensor) -> bool:
        """Returns the answer of a torch with CUDA, with or without a GPU."""
        return tensor.device.type == "cuda"

    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", acceptable)
    exported = export(load_source(Flattening().eval(), lambda batch: torch.rand(batch, 5, 4)), {"batch": (1, 8)})
    assert not exported.obstacles and torch.backends.cudnn.is_acceptable is acceptable


class Literals(nn.Module):
    """Tensors that are created without a call of a torch mode, and then moved to the input's device, as in pytorch-tabnet."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.sqrt(torch.FloatTensor([0.5, 1, 2, 3]).to(x.device))
        return y + torch.Tensor([1, 2, 3, 4]).to(x) + torch.DoubleTensor([1, 2, 3, 4]).to(x)


def test_constants_of_constructors_that_ask_no_mode_are_on_the_device_of_the_model() -> None:
    """Fake tensors replace GPU tensors."""
    source = load_source(Literals().eval(), lambda batch: (torch.randn(batch, 4),))
    module = flat.FlatModule(source.model, sample(source, {"batch": 2}), CUDA, CUDA)
    with FakeTensorMode(allow_non_fake_inputs=True):
        program = export_static(source, module, (torch.empty(2, 4, device="cuda"),))
    values = [*program.constants.values(), *[node.meta.get("val") for node in program.graph.nodes]]
    assert {value.device for value in values if isinstance(value, torch.Tensor)} == {CUDA}
    named = [value for node in program.graph.nodes for value in node.kwargs.values() if isinstance(value, torch.device)]
    assert named and {*named} == {CUDA}


def answers(model: Model, x: torch.Tensor) -> torch.Tensor:
    host = x.cpu()
    assert x.is_cuda and not x.is_cpu and x.device == torch.device("cuda:0") and x.get_device() == 0
    assert host.is_cpu and not host.is_cuda and host.device == torch.device("cpu") and host.get_device() == -1
    assert (x * 2).device == model.plain.device == model.linear.weight.device == torch.device("cuda:0")
    assert (host * 2).device == (host + model.plain).device == torch.zeros(2, device="cpu").device == torch.device("cpu")
    assert host[0].device.type == "cpu" and host.view(-1).device.type == "cpu" and host.cuda().device.type == "cuda"
    assert host.mul_(2).device.type == "cpu" and [column.device.type for column in host.unbind(1)] == ["cpu"] * 4
    return x * 2


def test_devices_are_answered_alike_in_eager_pytorch_and_in_a_trace() -> None:
    assert operations(traced(answers))[-1] == "mul"


def test_autocast_for_the_device_of_a_tensor_touches_its_tensors() -> None:
    def function(model: Model, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return model.linear(x)

    exported = traced(function)
    (node,) = [node for node in exported.programs.first.graph.nodes if node.op == "output"]
    assert node.args[0][0].meta["val"].dtype is torch.bfloat16


def test_nothing_stays_replaced() -> None:
    device, autocast = FakeTensor.__dict__["device"], torch.autocast.__init__
    with raises("eager-failed", match="boom"):
        traced(lambda m, x: (_ for _ in ()).throw(ValueError("boom")))
    assert FakeTensor.__dict__["device"] is device and torch.autocast.__init__ is autocast
    assert torch.overrides._get_current_function_mode_stack() == []


def helper(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def test_an_operation_has_the_innermost_line_of_the_users() -> None:
    from cgcompile.model.user_code import place

    nodes = traced(lambda m, x: helper(x)).programs.first.graph.nodes
    (node,) = [node for node in nodes if node.target is torch.ops.aten.sin.default]
    assert place(node)[1] == "return x.sin()"


def test_states_of_an_lstm_have_the_shapes_of_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, torch 2.11 traces states with an additional axis."""
    operate = tracked.operate
    monkeypatch.setattr(tracked, "operate", lambda *args: _with_an_axis(args[1], operate(*args)))
    net, x = torch.nn.LSTM(3, 5, num_layers=2, bidirectional=True), torch.randn(7, 2, 3)
    with track_devices([x], SideEffects()), torch.no_grad():
        output, (hidden, cell) = net(x)
    want, (first, second) = net(x)
    assert hidden.shape == cell.shape == (4, 2, 5)
    for got, wanted in ((output, want), (hidden, first), (cell, second)):
        torch.testing.assert_close(got, wanted)


def _with_an_axis(func: object, result: Any) -> Any:
    return (result[0], result[1][:, None], result[2][:, None]) if func == torch._VF.lstm else result


def test_where_the_bundle_runs_on_the_cpu_tensors_are_there() -> None:
    """A model whose code has a path for CPU tensors takes it, and device moves have no effect."""
    x = torch.ones(2, 3)
    with track_devices([x], SideEffects(), target_device=CPU) as effects:
        assert x.device == CPU and x.is_cpu and not x.is_cuda and x.get_device() == -1
        total = x.cuda() + torch.ones(3, device=x.device) + x.cpu() + x.to("cuda:0")
        assert total.device == CPU
    assert {obstacle.rule for obstacle in effects.obstacles} == {"moved-to-gpu"}


def test_integers_are_counted_where_the_cpu_stands_for_a_gpu() -> None:
    """Eager PyTorch supports `histc` of integers only on a GPU."""
    x = torch.tensor([0, 3, 1, 3, 3, 9], dtype=torch.int32)
    with track_devices([x], SideEffects()):
        for histogram in (torch.histc(x, bins=4, min=0, max=3), x.histc(4, 0, 3), torch.histc(input=x, bins=4, min=0, max=3)):
            assert histogram.dtype == torch.int32 and histogram.tolist() == [1, 1, 0, 3]


def test_a_model_may_ask_what_the_gpu_can_do_that_is_not_here() -> None:
    asked = torch.cuda.get_device_capability
    with track_devices([torch.zeros(1)], SideEffects(), capability=(9, 0)):
        assert torch.cuda.get_device_capability() == (9, 0)
    with track_devices([torch.zeros(1)], SideEffects(), target_device=CPU, capability=(9, 0)):
        assert torch.cuda.get_device_capability is asked
    assert torch.cuda.get_device_capability is asked


def test_a_model_may_ask_whether_it_is_captured() -> None:
    asked = torch.cuda.is_current_stream_capturing
    with track_devices([x := torch.zeros(1)], SideEffects()):
        assert x.is_cuda and not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.is_current_stream_capturing is asked
