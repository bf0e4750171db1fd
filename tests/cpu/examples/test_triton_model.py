"""examples/triton_model.py over a fake triton_python_backend_utils, which has the names and signatures of Triton's module."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.helpers.places import ROOT

numpy = pytest.importorskip("numpy")


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class Request:
    def __init__(self, *inputs: Tensor) -> None:
        self._inputs = inputs

    def inputs(self) -> tuple[Tensor, ...]:
        return self._inputs


class Response:
    def __init__(self, output_tensors: list[Tensor], error: Any = None) -> None:
        assert type(output_tensors) is list
        self.outputs, self.error = output_tensors, error


class TritonError:
    def __init__(self, msg: str) -> None:
        self.msg = msg


class Config:
    """The object that Triton passes to auto_complete_config."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def set_max_batch_size(self, size: int) -> None:
        self.calls.append(size)

    def set_dynamic_batching(self) -> None:
        self.calls.append("dynamic")

    def add_input(self, row: dict[str, Any]) -> None:
        self.calls.append(("input", row))

    def add_output(self, row: dict[str, Any]) -> None:
        self.calls.append(("output", row))


@pytest.fixture
def model(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Imports model.py from the version's folder, as Triton does."""
    version = tmp_path / "tiny" / "1"
    version.mkdir(parents=True)
    shutil.copytree(bundle, version / "model.cgb")
    shutil.copy(ROOT / "examples" / "triton_model.py", version / "model.py")
    backend: Any = SimpleNamespace(Tensor=Tensor, InferenceResponse=Response, TritonError=TritonError)
    backend.get_input_tensor_by_name = lambda request, name: next((t for t in request.inputs() if t.name() == name), None)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    spec = importlib.util.spec_from_file_location("model", version / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def test_the_configuration_is_the_bundles(model: ModuleType) -> None:
    config = Config()
    assert model.TritonPythonModel.auto_complete_config(config) is config
    assert config.calls == [
        4, "dynamic", ("input", {"name": "input", "data_type": "TYPE_FP32", "dims": [6]}),
        ("output", {"name": "output", "data_type": "TYPE_FP32", "dims": [3]}),
    ]  # fmt: skip


def test_requests_are_answered_together_and_each_its_own(model: ModuleType, bundle: Path) -> None:
    import cgbundle

    loaded = model.TritonPythonModel()
    loaded.initialize({"model_instance_kind": "CPU", "model_instance_device_id": "0"})
    calls, replay = list[int](), loaded.program.replay
    loaded.program.replay = lambda tensors: (calls.append(len(tensors[0])), replay(tensors))[1]
    rows = numpy.random.default_rng(0).standard_normal((6, 6)).astype(numpy.float32)
    parts = [rows[:1], rows[1:3], numpy.zeros((1, 7), numpy.float32), rows[3:]]
    responses = loaded.execute([Request(Tensor("input", part)) for part in parts])
    assert calls == [6, 1], "one call for all of one shape"
    assert responses[2].outputs == [] and "input" in responses[2].error.msg and "\n" not in responses[2].error.msg
    with cgbundle.load(bundle) as program:
        for part, response in ((parts[0], responses[0]), (parts[1], responses[1]), (parts[3], responses[3])):
            [output] = response.outputs
            assert response.error is None and output.name() == "output"
            assert numpy.allclose(output.as_numpy(), program(part), atol=1e-5)
    loaded.finalize()
    [response] = loaded.execute([Request(Tensor("input", parts[0]))])
    assert "closed" in response.error.msg
