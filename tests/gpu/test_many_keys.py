"""A bundle is used while its graphs are built in the background: right results from several threads, and inside a capture."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import cgbundle
from cgbundle.gpu import backend
from tests.gpu.test_inputs import bundle as bundle
from tests.gpu.test_inputs import flat, on_gpu

torch = pytest.importorskip("torch")


@pytest.fixture
def none_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "EAGER", 0)


@pytest.mark.usefixtures("none_at_load")
def test_calls_that_come_before_their_graph(bundle: Path) -> None:
    with cgbundle.load(bundle, lazy=False) as program:
        inputs = on_gpu(bundle, program)
        wanted = {key: [tensor.clone() for tensor in flat(program(*row))] for key, row in inputs.items()}
        torch.cuda.synchronize()
    for _ in range(10):
        with cgbundle.load(bundle) as program:
            failures: list[BaseException] = []

            def work(program: Any = program, failures: list[BaseException] = failures) -> None:
                try:
                    for key, row in inputs.items():
                        for one, other in zip(flat(program(*row)), wanted[key], strict=True):
                            assert torch.equal(one, other)
                except BaseException as error:  # noqa: BLE001 - the test's thread raises it
                    failures.append(error)

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if failures:
                raise failures[0]


@pytest.mark.usefixtures("none_at_load")
def test_a_capture_right_after_the_load(bundle: Path) -> None:
    with cgbundle.load(bundle, lazy=False) as program:
        inputs = on_gpu(bundle, program)
        wanted = {key: [tensor.clone() for tensor in flat(program(*row))] for key, row in inputs.items()}
        torch.cuda.synchronize()
    for key, row in inputs.items():
        with cgbundle.load(bundle) as program:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = flat(program(*row))
            graph.replay()
            torch.cuda.synchronize()
            for one, other in zip(outputs, wanted[key], strict=True):
                assert torch.equal(one, other)
