"""Mutated inputs in a recorder process.  The process runs on the CPU, with replacements of torch.cuda's functions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cgcompile.export.export import export
from cgcompile.model.load import load_source
from tests.cpu.capture.recorder import regions
from tests.helpers.models.written_models import MODELS, draw, eager
from tests.helpers.raising import raises

assert regions, "this import must come first: the next ones need its replacement of cuda-bindings"
from cgcompile.capture.request import Request  # noqa: E402
from cgcompile.capture.worker import loaded_program as recorder  # noqa: E402
from cgcompile.capture.worker import record  # noqa: E402
from cgcompile.targets.weights import row_major  # noqa: E402

KEY = (4,)


@pytest.fixture(params=sorted(MODELS))
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Returns a loaded program, with an example call and a self-test call, and the model."""
    model_class, inputs, written = MODELS[request.param]
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in (
        ("Stream", lambda: stream), ("current_stream", lambda: stream), ("stream", lambda cuda_stream: nullcontext()),
        ("synchronize", lambda: None), ("get_rng_state", lambda: torch.zeros(1)),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    for module in (recorder, record):
        monkeypatch.setattr(module, "place_inputs", lambda tensors, buffer: [tensor.clone() for tensor in tensors])
    network = model_class()
    program = export(load_source(network, inputs), {"batch": (1, 4)}).programs.first
    recorder_request = Request(
        role="record", programs={KEY: tmp_path}, calls=tmp_path, result=tmp_path, keys=(KEY,), level="eager", specialize="size",
        code="", placements={}, uploads={}, stored=tmp_path, weights=(), weights_end=0, state_end=0, inputs_end=0, settings={},
        shift=False, written={KEY: written}, self_test_calls={KEY: 1},
    )  # fmt: skip
    empty = torch.empty(0)
    calls = {KEY: ((draw(inputs, 4, 0), {}), (draw(inputs, 4, 1), {}))}
    loaded = recorder.LoadedProgram(
        request=recorder_request, split={}, modules={KEY: program.module()}, first={}, digests={}, weights=empty, state=empty,
        inputs=empty, calls=calls,
    )  # fmt: skip
    return loaded, network


def test_warm_up_restores_the_example_inputs(case: tuple[Any, Any]) -> None:
    loaded, _ = case
    call, static = recorder.warm_up(loaded, KEY, lambda text: None)
    examples = loaded.calls[KEY][0][0]
    assert [torch.equal(one, other) for one, other in zip(static, examples, strict=True)] == [True] * len(examples)
    call()
    changed = {index for index, (one, other) in enumerate(zip(static, examples, strict=True)) if not torch.equal(one, other)}
    assert changed == set(loaded.request.written[KEY]), "the call mutates its inputs and does not restore them"


class Graph:
    """Replaces a captured graph.  `run`: is called by a replay."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run

    def instantiate(self) -> None:
        """Does nothing."""


def run_self_test(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, corrupt: Callable[[list[Tensor]], None] = lambda static: None
) -> Any:
    static: list[Tensor] = []

    def place(tensors: Any, buffer: Any) -> list[Tensor]:
        static[:] = [tensor.clone() for tensor in tensors]
        return static

    item = SimpleNamespace(key=KEY, kept=())

    def replay() -> None:
        with torch.no_grad():
            outputs = loaded.modules[KEY](*static)
        item.kept = tuple(outputs)
        corrupt(static)

    item.steps = (Graph(replay),)
    monkeypatch.setattr(record, "place_inputs", place)
    return record._examine(loaded, KEY, [item])


def test_the_self_test_contains_the_mutated_inputs(case: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, network = case
    self_test = run_self_test(loaded, monkeypatch)
    fresh = loaded.calls[KEY][1][0]
    outputs, after = eager(network, fresh)
    assert all(difference.error == 0 for difference in self_test.differences) and self_test.mutated == tuple(
        [row_major(after[index]) for index in loaded.request.written[KEY]]
    )
    assert self_test.outputs == tuple([row_major(output) for output in outputs])


def test_a_replay_that_mutates_an_input_wrongly_is_an_error(case: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, _ = case
    index = loaded.request.written[KEY][-1]
    wrong = run_self_test(loaded, monkeypatch, lambda static: static[index].copy_(static[index].flip(0).logical_not()))
    assert any(difference.error > 0 and difference.text for difference in wrong.differences)


def test_a_mutation_that_the_program_does_not_declare_is_refused(case: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, _ = case
    others = set(range(len(loaded.calls[KEY][0][0]))) - set(loaded.request.written[KEY])
    if not others:
        pytest.skip("it writes to all of its inputs")
    with raises("input-mutated", match=f"tensor {min(others)} of its inputs"):
        run_self_test(loaded, monkeypatch, lambda static: static[min(others)].neg_())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_only_changed_elements_of_state_are_returned(order: tuple[int, int]) -> None:
    first = torch.zeros(4, 3).permute(order).contiguous().permute(order)  # the axes have this order in memory
    now = first.clone()
    now[1, 2] = -0.0
    now[2, :2] = torch.tensor([5.0, 6.0])
    loaded: Any = SimpleNamespace(first={"cache": first}, tensor_of=lambda row: now)
    runs, elements = record._changed(loaded, SimpleNamespace(name="cache"))  # type: ignore[arg-type]
    places = torch.frombuffer(bytearray(runs), dtype=torch.int64).reshape(-1, 2)
    flat = first.permute(order).reshape(-1).clone()
    values = torch.frombuffer(bytearray(elements), dtype=torch.float32)
    flat[torch.cat([torch.arange(begin, begin + count) for begin, count in places.tolist()])] = values
    assert len(values) == 3 and row_major(flat) == row_major(now.permute(order))
