"""Captures a program with several regions; graphs are Python calls. Tests the order of execution and the values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cgbundle.format.schema import Weight
from cgcompile.capture.request import Request
from cgcompile.checks import check
from cgcompile.export.export import export
from cgcompile.export.functionalization import state_buffers, written_inputs
from cgcompile.export.weights import weight_tensors
from cgcompile.model.load import load_source
from cgcompile.model.source import Source, sample
from cgcompile.targets.cuda.host_regions import SplitProgram, split_program
from cgcompile.targets.memory_layout import lay_out
from cgcompile.targets.weights import shapes_of
from tests.cpu.capture.recorder import regions
from tests.helpers.models.state_models import Between, between

assert regions, "modules of the recorder can be imported from here on"
from cgcompile.capture.worker import loaded_program, steps  # noqa: E402

KEYS = ((1,), (4,))

MIDDLE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) + x
            if i == 2:
                total = x[x > 0].sum()
                x = x / (total.item() + 1.0)
        return x, total

def model():
    torch.manual_seed(0)
    return Net().eval()

def inputs(batch):
    return (torch.randn(batch, 16),)
"""


BRANCHES = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(6)])
        self.second = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x):
        h = torch.cond(x.sum() > 0, lambda h: h.sin(), lambda h: h.cos() * 2, (self.first(x),))
        h = self.second(h / (h[h > 0].sum().item() + 1.0))
        start = torch.zeros((), dtype=torch.int64)
        return torch.while_loop(lambda i, h: (i < 5) & (h.abs().sum() < 40), lambda i, h: (i + 1, h * 1.5), (start, h))

def model():
    torch.manual_seed(0)
    return Net().eval()

def inputs(batch):
    return (torch.randn(batch, 16),)
"""


class Graph:
    """A graph that repeats a call and writes to the outputs of its capture."""

    def __init__(self, call: Callable[[], Any], outputs: tuple[torch.Tensor, ...]) -> None:
        self.call, self.outputs = call, outputs

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def instantiate(self) -> None:
        pass

    def replay(self) -> None:
        for target, value in zip(self.outputs, self.call(), strict=True):
            target.copy_(value)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Replaces the GPU by the CPU. Returns the memory pools of the captured graphs."""
    held: dict[int, torch.Tensor] = {}
    asked: list[object] = []
    buffer: dict[Any, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}

    def captured(call: Callable[[], Any], where: str, pool: object = None) -> tuple[Graph, Any]:
        asked.append(pool)
        lasting = [*buffer.values(), *state.values()]
        before = [tensor.clone() for tensor in lasting]
        outputs = tuple(call())
        for tensor, value in zip(lasting, before, strict=True):  # a capture must not run anything
            tensor.copy_(value)
        held.update({tensor.data_ptr(): tensor for tensor in outputs})
        return Graph(call, outputs), outputs

    def tensor_of(loaded: regions.LoadedProgram, row: Weight) -> torch.Tensor:
        return state.setdefault(row.name, weight_tensors(loaded.split[KEYS[0]])[row.name])

    def warmed(call: Callable[[], Any], where: str, level: str, restore: Callable[[], None]) -> None:
        call(), restore()

    def placed(at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return buffer.setdefault((at, shape), torch.zeros(shape, dtype=dtype))

    monkeypatch.setattr(
        regions, "place_inputs", lambda tensors, buffer: [placed(-i, t.shape, t.dtype).copy_(t) for i, t in enumerate(tensors)]
    )
    monkeypatch.setattr(regions, "tensor_at", lambda buffer, at, dtype, shape, strides: placed(at, shape, getattr(torch, dtype)))
    for module in (regions, loaded_program):
        monkeypatch.setattr(module, "lower", lambda module, level, specialize: module)
        monkeypatch.setattr(module, "run_warm", warmed)
        monkeypatch.setattr(module, "capture_call", captured)
    monkeypatch.setattr(steps, "condition", lambda place: ctypes.c_uint8.from_address(place.address).value)
    monkeypatch.setattr(regions.LoadedProgram, "tensor_of", tensor_of)
    monkeypatch.setattr(regions, "_host_view", lambda spot: held[spot.address])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    return asked


def planned(folder: Path, source: Source) -> tuple[regions.LoadedProgram, SplitProgram]:
    exported = export(source, {"batch": tuple(key[0] for key in KEYS)})
    checked = check(exported, conditionals=True)
    placed, changed = checked.placements, checked.functionalized[KEYS[0]]
    tensors = exported.programs.weights()
    calls = {key: [sample(source, {"batch": key[0]}, seed).tensors for seed in (0, 1)] for key in KEYS}
    split = split_program(exported.programs, placed, {key: both[0] for key, both in calls.items()})
    request = Request(
        role="record", programs=dict.fromkeys(KEYS, folder), calls=folder, result=folder, keys=KEYS, level="eager",
        specialize="size", code="", placements=placed, uploads=split.uploads, stored=folder,
        weights=lay_out(shapes_of(tensors), state_buffers(changed)).rows, written=dict.fromkeys(KEYS, written_inputs(changed)),
        self_test_calls=dict.fromkeys(KEYS, 1),
        weights_end=0, state_end=0, inputs_end=0,
        settings={}, shift=False,
    )  # fmt: skip
    nothing = torch.empty(0)
    loaded = regions.LoadedProgram(
        request=request, split=dict.fromkeys(KEYS, exported.programs.first), modules=dict.fromkeys(KEYS, exported.flat),
        first={name: tensors[name].clone() for name in state_buffers(changed)}, digests={},
        weights=nothing, state=nothing, inputs=nothing,
        calls={key: ((first, {}), (second, {})) for key, (first, second) in calls.items()},
    )  # fmt: skip
    return loaded, split


@pytest.mark.parametrize("key", KEYS)
def test_a_replay_with_other_inputs_gives_what_the_model_gives(key: tuple[int, ...], tmp_path: Path, pools: list[object]) -> None:
    (tmp_path / "model.py").write_text(MIDDLE)
    loaded, split = planned(tmp_path, load_source(str(tmp_path / "model.py")))
    captured = regions.capture_regions(loaded, key, lambda text: None)
    assert [region.kind for region in split.partitions[key].regions] == ["graph", "host", "graph"]
    assert [item.region for item in captured] == [0, 1]
    assert pools == [None, (0, 1)], "one pool for the graphs of a key"
    opened = regions.open_regions(loaded, key)
    fresh = loaded.calls[key][1][0]
    for static, value in zip(opened.static, fresh, strict=True):
        static.copy_(value)
    outputs = regions.replay_regions(opened, captured)
    with torch.no_grad():
        wanted = loaded.modules[key](*fresh)
    eager = regions.eager_regions(opened, fresh)
    for got, want, eager_output in zip(outputs, wanted, eager, strict=True):
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(eager_output, want)


@pytest.mark.parametrize("key", KEYS)
def test_branches_and_loops_beside_a_region_of_the_host(key: tuple[int, ...], tmp_path: Path, pools: list[object]) -> None:
    (tmp_path / "model.py").write_text(BRANCHES)
    loaded, split = planned(tmp_path, load_source(str(tmp_path / "model.py")))
    assert [region.kind for region in split.partitions[key].regions] == ["graph", "host", "graph"]
    regions.warm_up_regions(loaded, key, lambda text: None)
    captured = regions.capture_regions(loaded, key, lambda text: None)
    assert [[step.type for step in item.steps if isinstance(step, steps.Conditional)] for item in captured] == [["if"], ["while"]]
    assert pools[0] is None and set(pools[1:]) == {(0, 1)}, "one pool for all"
    opened = regions.open_regions(loaded, key)
    for shift in (-2, 2, 0.1):
        x = loaded.calls[key][1][0][0] + shift
        opened.static[0].copy_(x)
        with torch.no_grad():
            wanted = loaded.modules[key](x)
        for got, want in zip(regions.replay_regions(opened, captured), wanted, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("key", KEYS)
def test_replays_carry_state_and_change_inputs_as_the_model_does(key: tuple[int, ...], tmp_path: Path, pools: list[object]) -> None:
    network = Between().eval()
    loaded, split = planned(tmp_path, load_source(Between().eval(), between))
    assert split.partitions[key].state == ("b_model_count",)
    rows = [row for row in loaded.request.weights if row.memory == "state"]

    def state() -> dict[str, torch.Tensor]:
        return {row.name.removeprefix("model."): loaded.tensor_of(row).clone() for row in rows}

    first = state()
    captured = regions.capture_regions(loaded, key, lambda text: None)
    assert first.keys() == {"mean", "count", "cache"} and all(torch.equal(first[name], value) for name, value in state().items())
    opened = regions.open_regions(loaded, key)
    for _ in range(2):
        fresh = [tensor.clone() for tensor in loaded.calls[key][1][0]]
        for static, value in zip(opened.static, fresh, strict=True):
            static.copy_(value)
        outputs = regions.replay_regions(opened, captured)
        with torch.no_grad():
            wanted = network(*fresh)
        for got, want in zip([*outputs, *opened.static], [*wanted, *fresh], strict=True):
            torch.testing.assert_close(got, want)
        for name, value in network.named_buffers():
            torch.testing.assert_close(state()[name], value)
