"""Measures Ray Serve from zero replicas on: a bundle by cgserve.ray_replicas, and the same deployment on eager PyTorch.

    python tests/bench/server/ray_cold.py minilm.cgb        (a bundle of examples/minilm.py; needs ray, torch and transformers)

The two alternate. Measured are: the time of the first request, which starts the first replica; then a load of clients that send
requests without a pause; and the first answer of the second replica.  All answers are compared with eager PyTorch in this process.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "bundles")]

import minilm  # noqa: E402
import ray  # noqa: E402
from ray import serve  # noqa: E402
from starlette.requests import Request  # noqa: E402

from cgserve import ray_replicas  # noqa: E402

PORT = 8765
PATH = "/v2/models/minilm/infer"
SENTENCE = "The cat sleeps on the windowsill while rain falls."
TOLERANCE = 1e-4


@serve.deployment(max_ongoing_requests=256, autoscaling_config=ray_replicas.SCALING, graceful_shutdown_timeout_s=30)
class Eager:
    """Does what `ray_replicas.Bundles` does, with PyTorch instead of the bundle."""

    def __init__(self) -> None:
        self._network = minilm.model()

    async def __call__(self, request: Request) -> Any:
        import torch

        if request.method == "GET":
            return {"process": os.getpid()}
        inputs = {entry["name"]: torch.tensor(entry["data"]).reshape(entry["shape"]) for entry in (await request.json())["inputs"]}
        with torch.inference_mode():
            output = self._network(inputs["input_ids"], inputs["attention_mask"])
        return {"outputs": [{"data": output.flatten().tolist()}], "process": os.getpid()}


def ask(method: str, path: str, body: bytes | None = None) -> Any:
    """Returns the answer as JSON; None if the status is not 200."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        text = answer.read()
        return json.loads(text) if answer.status == 200 else None
    finally:
        connection.close()


@contextmanager
def running(application: Any) -> Iterator[None]:
    """Deploys the application, without any replica yet."""
    serve.run(application, name="cold")
    try:
        yield
    finally:
        serve.delete("cold")


def measure(application: Any, body: bytes, expected: Sequence[float], clients: int, seconds: float) -> dict[str, Any]:
    """Runs one round of an application. Raises AssertionError if an answer differs from eager PyTorch's."""
    numbers: dict[str, Any] = {"answers": 0, "again": 0}
    with running(application):
        began = time.monotonic()

        def once() -> bool:
            answer = ask("POST", PATH, body)
            if answer is None:
                numbers["again"] += 1
                return False
            assert max(abs(a - b) for a, b in zip(answer["outputs"][0]["data"], expected, strict=True)) < TOLERANCE
            numbers["answers"] += 1
            return True

        while not once():
            time.sleep(0.05)
        numbers["first"] = time.monotonic() - began
        end, loaded = time.monotonic() + seconds, time.monotonic()

        def client() -> None:
            while time.monotonic() < end:
                once()

        threads = [threading.Thread(target=client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        seen: set[int] = set()
        while time.monotonic() < end and "second" not in numbers:
            health = ask("GET", "/v2/health/live")
            seen |= {health["process"]} if health else set()
            if len(seen) == 2:
                numbers["second"] = time.monotonic() - loaded
            time.sleep(0.05)
        for thread in threads:
            thread.join()
    return numbers


def main() -> int:
    """Returns 0 if every answer was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=30.0, help="of load in a round")
    arguments = parser.parse_args()
    import torch

    ids, mask = minilm.tokenize([SENTENCE])
    with torch.inference_mode():
        expected = minilm.model()(torch.from_numpy(ids), torch.from_numpy(mask)).flatten().tolist()
    rows = [("input_ids", ids), ("attention_mask", mask)]
    asked = [{"name": n, "datatype": "INT64", "shape": list(array.shape), "data": array.flatten().tolist()} for n, array in rows]
    body = json.dumps({"inputs": asked}).encode()
    measurements: dict[str, list[dict[str, Any]]] = {"bundle": [], "eager": []}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(arguments.bundle, Path(folder, "models", "minilm", "1", "model.cgb"))
        paths = os.pathsep.join([str(ROOT / "examples"), str(ROOT / "bundles"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}}, log_to_driver=False)
        try:
            serve.start(http_options={"port": PORT})
            applications = {
                "bundle": ray_replicas.app({"folder": str(Path(folder, "models")), "cpus": "0.5"}),
                "eager": Eager.options(ray_actor_options={"num_cpus": 0.5}).bind(),  # type: ignore[attr-defined]
            }
            for _ in range(arguments.rounds):
                for name, application in applications.items():
                    measurements[name].append(measure(application, body, expected, arguments.clients, arguments.seconds))
                    print(name, measurements[name][-1], os.getloadavg()[0], flush=True)
        finally:
            serve.shutdown()
            ray.shutdown()
    for name, rounds in measurements.items():
        first = statistics.median(round_["first"] for round_ in rounds)
        second = [round_["second"] for round_ in rounds if "second" in round_]
        later = f"{statistics.median(second):.1f} s" if second else "none"
        answers = sum(round_["answers"] for round_ in rounds)
        print(f"{name}: first answer after {first:.1f} s; second replica under load after {later}; {answers} answers, all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
