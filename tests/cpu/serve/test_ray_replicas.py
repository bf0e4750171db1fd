"""cgserve.ray_replicas in a local Ray cluster: from zero replicas to answers, and killed replicas."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.places import ROOT

ray = pytest.importorskip("ray", reason="pip install '.[ray]'")
serve = pytest.importorskip("ray.serve", reason="pip install '.[ray]'")

PORT = 8765
ROW = [1.0, -2.0, 0.5, 3.0, 0.0, -1.0]


@pytest.fixture(scope="module")
def cluster(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Deploys the application without a replica and returns its handle."""
    folder = tmp_path_factory.mktemp("ray") / "models"
    for name in ("first", "second"):
        shutil.copytree(bundle, folder / name / "1" / "model.cgb")
    paths = os.pathsep.join([str(ROOT / "bundles"), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}}, log_to_driver=False)
    try:
        from cgserve import ray_replicas

        serve.start(http_options={"port": PORT})
        yield serve.run(ray_replicas.app({"folder": str(folder), "cpus": "0.5"}))
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(path: str, body: Any = None, model: str = "", timeout: float = 120) -> tuple[int, Any]:
    """Returns (status, body as JSON) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=timeout)
    try:
        headers = {"serve_multiplexed_model_id": model} if model else {}
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text.startswith((b"{", b"[")) else text
    finally:
        connection.close()


def infer(value: float, model: str = "first") -> tuple[int, Any]:
    row = {"name": "input", "datatype": "FP32", "shape": [1, 6], "data": [value * element for element in ROW]}
    return ask(f"/v2/models/{model}/infer", {"inputs": [row]}, model)


@pytest.fixture(scope="module")
def expected(bundle: Path) -> Any:
    import cgbundle

    numpy = pytest.importorskip("numpy")
    program = cgbundle.load(bundle)
    return lambda value: program(numpy.asarray([ROW], numpy.float32) * numpy.float32(value))[0].tolist()


def test_from_no_replica_to_answers_without_torch(cluster: Any, expected: Any) -> None:
    assert serve.status().applications["default"].deployments["Bundles"].replica_states.get("RUNNING", 0) == 0
    began = time.monotonic()
    status, response = infer(1.0)
    print(f"from no replica to the first answer: {time.monotonic() - began:.2f} s")
    assert status == 200 and response["outputs"][0]["data"] == pytest.approx(expected(1.0), abs=1e-5)
    about = ask("/v2/health/live")[1]
    assert about["torch"] is False and about["loaded"] == {"first": 1}
    assert infer(2.0, "second")[1]["outputs"][0]["data"] == pytest.approx(expected(2.0), abs=1e-5)
    assert ask("/v2/models/first")[1]["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 6]}]
    assert infer(1.0, "other") == (404, {"error": "no model 'other'"})
    assert ask("/v2/models/first/infer", {"inputs": []}) == (400, {"error": "input 'input' is missing"})


def test_by_a_handle(cluster: Any, expected: Any) -> None:
    import struct

    from cgserve.tensors.inference_protocol import TensorData

    infer_inputs = [TensorData((1, 6), struct.pack("<6f", *ROW))]
    [answer] = cluster.options(multiplexed_model_id="first").infer.remote("first", infer_inputs).result(timeout_s=120)
    assert struct.unpack("<3f", answer.data) == pytest.approx(expected(1.0), abs=1e-5)


def killed_under_load(expected: Any, requests: int, clients: int, kills: int) -> SimpleNamespace:
    """Returns the answers of clients that repeat unanswered requests while replicas are killed."""
    tally = SimpleNamespace(right=0, wrong=list[Any](), again=0, killed=set[int]())
    left, lock = iter(range(requests)), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            while True:
                try:
                    status, response = infer(number % 97)
                except (OSError, http.client.HTTPException):
                    status, response = 0, None
                if status in (200, 400):
                    break
                with lock:
                    tally.again += 1
                time.sleep(0.05)
            fits = status == 200 and response["outputs"][0]["data"] == pytest.approx(expected(number % 97), abs=1e-3)
            with lock:
                tally.right += fits
                if not fits:
                    tally.wrong.append((status, response))

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    pause = 0.0
    while any(thread.is_alive() for thread in threads):
        if (
            len(tally.killed) < kills
            and tally.right >= (len(tally.killed) + 1) * requests // (kills + 2)
            and time.monotonic() > pause
        ):
            try:
                process = ask("/v2/health/live", timeout=5)[1]["process"]
                os.kill(process, signal.SIGKILL)
                tally.killed.add(process)
            except (OSError, TypeError, KeyError):
                pass  # no replica answers at the moment
            pause = time.monotonic() + 1
        time.sleep(0.02)
    return tally


def test_replicas_that_are_killed_lose_no_request(cluster: Any, expected: Any) -> None:
    tally = killed_under_load(expected, requests=200, clients=8, kills=2)
    print(f"{tally.right} right, {tally.again} asked again, {len(tally.killed)} killed")
    assert tally.wrong == [] and tally.right == 200 and tally.killed
