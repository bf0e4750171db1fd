"""The vLLM plugin without vLLM: the worker that it selects, the files that it saves with the graphs, and how it attaches graphs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.helpers.places import ROOT  # noqa: E402


@dataclass(frozen=True)
class BatchDescriptor:
    num_tokens: int


@dataclass
class Entry:
    batch_descriptor: BatchDescriptor
    cudagraph: Any = None
    output: Any = None


@dataclass(eq=False)
class Wrapper:
    runnable: Any
    concrete_cudagraph_entries: dict[BatchDescriptor, Entry] = field(default_factory=dict)


class Platform:
    def is_cuda(self) -> bool:
        return True

    @classmethod
    def check_and_update_config(cls, config: Any) -> None:
        config.checked = True


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Makes a fake vllm package with the names that the plugin imports."""
    names: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.24.0"},
        "vllm.platforms": {"current_platform": type("Cuda", (Platform,), {})()},
        "vllm.compilation.cuda_graph": {"CUDAGraphEntry": Entry, "CUDAGraphWrapper": Wrapper},
        "vllm.forward_context": {"BatchDescriptor": BatchDescriptor},
        "vllm.v1.worker.gpu.cudagraph_utils": {"prepare_inputs_to_capture": None},
    }
    for name, attributes in names.items():
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
        vars(module).update(attributes)
    monkeypatch.syspath_prepend(str(ROOT / "examples/vllm_plugin"))
    yield sys.modules["vllm"]
    for name in [name for name in sys.modules if name.startswith("cgcompile_vllm")]:
        del sys.modules[name]


def chosen(worker: str) -> SimpleNamespace:
    """Returns the checked configuration for a worker name."""
    platform = sys.modules["vllm.platforms"].current_platform
    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=worker), checked=False)
    platform.check_and_update_config(config)
    assert config.checked
    return config


def test_only_a_choice_that_was_left_to_vllm_is_made(vllm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = importlib.import_module("cgcompile_vllm")
    monkeypatch.delenv(plugin.FOLDER, raising=False)
    plugin.register()
    assert chosen("auto").parallel_config.worker_cls == "auto", "without the variable it does nothing"
    monkeypatch.setenv(plugin.FOLDER, str(tmp_path))
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setenv("VLLM_USE_MEGA_AOT_ARTIFACT", "0")
    plugin.register()
    assert os.environ["VLLM_USE_MEGA_AOT_ARTIFACT"] == "0", "the user's choice"
    assert chosen("auto").parallel_config.worker_cls == "cgcompile_vllm.worker.GraphWorker"
    assert chosen("theirs.Worker").parallel_config.worker_cls == "theirs.Worker"


def test_another_version_is_left_alone(
    vllm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = importlib.import_module("cgcompile_vllm")
    monkeypatch.setenv(plugin.FOLDER, str(tmp_path))
    monkeypatch.setattr(vllm, "__version__", "0.25.1")
    plugin.register()
    assert chosen("auto").parallel_config.worker_cls == "auto"
    assert "vLLM 0.25.1 is not known" in caplog.text


def test_attached_graphs_go_where_captured_ones_were(vllm: ModuleType, tmp_path: Path) -> None:
    engine, record = (importlib.import_module(f"cgcompile_vllm.{name}") for name in ("engine", "record"))
    parts = {index: Wrapper(SimpleNamespace(piecewise_compile_index=index)) for index in (0, 1)}
    x, y = torch.ones(8, 4), torch.zeros(8)
    outputs = {(0, 8): [x, 8, y], (0, 4): [x[:4], 4, y[:4]], (1, 8): x, (1, 4): x[:4]}
    for (index, tokens), output in outputs.items():
        descriptor = BatchDescriptor(tokens)
        parts[index].concrete_cudagraph_entries[descriptor] = Entry(descriptor, f"graph {index} {tokens}", output)
    pieces, graphs, tensors = engine.captured_pieces(parts)
    assert list(graphs) == [("piece", 8, 0), ("piece", 8, 1), ("piece", 4, 0), ("piece", 4, 1)], "in the order of a forward pass"
    kept = record.Record(config="c", compiled="d", cache=1, free=2, hidden=((8, 4), "bfloat16"), pieces=tuple(pieces))
    record.write_record(tmp_path, kept)
    read = record.read_record(tmp_path)
    assert read == kept
    others = {index: Wrapper(SimpleNamespace(piecewise_compile_index=index)) for index in (0, 1)}
    engine.give_pieces(read.pieces, others, {key: f"attached {graph}" for key, graph in graphs.items()}, tensors)
    for (index, tokens), output in outputs.items():
        entry = others[index].concrete_cudagraph_entries[BatchDescriptor(tokens)]
        assert entry.cudagraph == f"attached graph {index} {tokens}" and str(entry.output) == str(output)


def test_a_record_that_cannot_be_read_is_none(vllm: ModuleType, tmp_path: Path) -> None:
    record = importlib.import_module("cgcompile_vllm.record")
    assert record.read_record(tmp_path) is None
    for text in ("", "[]", '{"config": "c"}'):
        (tmp_path / record.NAME).write_text(text)
        assert record.read_record(tmp_path) is None


def test_tensors_are_named_by_the_attributes_that_lead_to_them(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = importlib.import_module("cgcompile_vllm.engine")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    runner = type("Runner", (), {"__module__": "vllm.v1"})()
    runner.model, runner.kv_caches, runner.name = torch.nn.Linear(2, 3), [torch.zeros(2), torch.zeros(4)], "a name"
    runner.table, runner.itself = {"ids": torch.zeros(0), 7: torch.ones(1), "pointers": torch.zeros(2, dtype=torch.uint64)}, runner
    runner.other = SimpleNamespace(hidden=torch.zeros(1))
    names = {name: tuple(tensor.shape) for name, tensor in engine.engine_tensors(runner).items()}
    assert names == {
        "runner.model._parameters.weight": (3, 2), "runner.model._parameters.bias": (3,), "runner.kv_caches.0": (2,),
        "runner.kv_caches.1": (4,), "runner.table.7": (1,),
    }  # fmt: skip
