"""The Open Inference Protocol over real HTTP: the protocol, version changes under load, refusals, and shutdown."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cgbundle.format import archive, file_names, safetensors_files
from cgbundle.format.schema import DataSize, Dimension, TensorSpec
from cgcompile.bundle import manifest_text
from tests.helpers.places import GOLDEN, ROOT, skip_older_torch

HEADER = "Inference-Header-Content-Length"
STARTS = 300
"""Seconds that a server may take to start on a busy machine."""


# --- versions of one model whose answers identify the version ----------------------------------------------------------


def shifted(bundle: Path, folder: Path, shift: float, examined: bool = True) -> Path:
    """Returns a copy of the tiny bundle whose last bias, and so every answer, is larger by `shift`. With `examined`, its self-test
    expects these answers."""
    shutil.copytree(bundle, folder)
    _add(folder / file_names.WEIGHTS, lambda name: name == "2.bias", shift)
    if examined:
        _add(folder / file_names.SELF_TEST, lambda name: "/output/" in name, shift)
    manifest = replace(archive.read_manifest(str(folder)), files=manifest_text.describe_files(str(folder)))
    (folder / file_names.MANIFEST).write_bytes(manifest_text.encode(manifest))
    return folder


def _add(path: Path, chosen: Callable[[str], bool], shift: float) -> None:
    mapped = safetensors_files.Mapped(str(path), path.name)
    tensors: dict[str, safetensors_files.Tensor] = {}
    for name, entry in mapped.entries.items():
        data = bytes(mapped.data(name))
        if chosen(name):
            count = len(data) // 4
            data = struct.pack(f"<{count}f", *[value + shift for value in struct.unpack(f"<{count}f", data)])
        tensors[name] = entry.dtype, entry.shape, lambda data=data: data
    mapped.close()
    with open(path, "wb") as file:
        safetensors_files.write(file, tensors)


class Folder:
    """A folder of one model, `tiny`, whose versions are added and removed atomically."""

    def __init__(self, path: Path, bundle: Path) -> None:
        self.path, self._bundle = path, bundle
        (path / "models" / "tiny").mkdir(parents=True)

    def put(self, number: int, examined: bool = True) -> None:
        """Adds version `number`, whose answers are larger by `number`."""
        version_folder = self.path / f"made-{number}"
        shifted(self._bundle, version_folder / "model.cgb", float(number), examined)
        version_folder.rename(self.path / "models" / "tiny" / str(number))

    def take(self, number: int) -> None:
        gone = self.path / f"gone-{number}"
        (self.path / "models" / "tiny" / str(number)).rename(gone)
        shutil.rmtree(gone)


class Client:
    """Sends requests to a server on a persistent connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Returns (status, body, headers); a JSON body is parsed."""
        text = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        self._connection.request(method, path, text, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = self._connection.getresponse()
        content, fields = answer.read(), dict(answer.getheaders())
        return answer.status, json.loads(content) if fields.get("content-type") == "application/json" else content, fields

    def infer(self, rows: Sequence[Sequence[float]], **more: Any) -> tuple[int, Any, dict[str, str]]:
        data = {"name": "input", "datatype": "FP32", "shape": [len(rows), 6], "data": list(rows)}
        return self.ask("POST", "/v2/models/tiny/infer", {"inputs": [data], **more})


class Server:
    """A `cgcompile serve` process and its log."""

    def __init__(self, folder: Path, *options: object, script: Sequence[str] = ("-m", "cgcompile_cli", "serve")) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles"), os.environ.get("PYTHONPATH", "")])
        command = [
            sys.executable,
            *script,
            str(folder),
            *(["--port", "0", "--log", "json"] if len(script) > 2 else []),
            *map(str, options),
        ]
        self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
        self.log: list[dict[str, Any]] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        listening = self.said(lambda event: event["event"] == "listening")
        assert listening["torch"] is False
        self.port = int(listening["url"].rpartition(":")[2])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(json.loads(line) if line.startswith("{") else {"event": "text", "text": line})

    def said(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Waits for the first matching event of the log and returns it."""
        end = time.monotonic() + STARTS
        while time.monotonic() < end:
            events = [event for event in list(self.log) if wanted(event)]
            if events:
                return events[0]
            if self.process.poll() is not None:
                self._reading.join(5)
                break
            time.sleep(0.01)
        raise AssertionError(self.log)

    def ready(self) -> Client:
        client, end = Client(self.port), time.monotonic() + STARTS
        while client.ask("GET", "/v2/health/ready")[0] != 200:
            assert time.monotonic() < end, self.log
            time.sleep(0.05)
        return client

    def memory(self) -> int:
        """Returns the bytes of anonymous memory of the process."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon"))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()


@contextmanager
def serving(folder: Path, *options: object) -> Iterator[Server]:
    server = Server(folder, *options)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def folder(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    for package in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(package, reason="pip install '.[serve]'")
    served_folder = Folder(tmp_path_factory.mktemp("served"), bundle)
    served_folder.put(1)
    return served_folder


@pytest.fixture(scope="module")
def server(folder: Folder) -> Iterator[Server]:
    """Runs one server for all tests that do not change it."""
    with serving(folder.path / "models", "--poll", 3600) as running_server:
        running_server.ready()
        yield running_server


@pytest.fixture(scope="module")
def eager(bundle: Path) -> Callable[[Sequence[Sequence[float]]], Any]:
    """Returns a function with the bundle's answers for rows."""
    import cgbundle

    numpy = pytest.importorskip("numpy")
    program = cgbundle.load(bundle)
    return lambda rows: program(numpy.asarray(rows, numpy.float32))


ROW = [1.0, -2.0, 0.5, 3.0, 0.0, -1.0]


# --- the protocol -----------------------------------------------------------------------------------------------------


def test_health_and_metadata(server: Server) -> None:
    client = Client(server.port)
    assert client.ask("GET", "/v2")[1]["extensions"] == ["binary_tensor_data", "model_repository"]
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/tiny/ready", "/v2/models/tiny/versions/1/ready"):
        assert client.ask("GET", path)[0] == 200
    for path in ("/v2/models/tiny", "/v2/models/tiny/versions/1"):
        metadata = client.ask("GET", path)[1]
        assert metadata == {
            "name": "tiny", "versions": ["1"], "platform": "cgbundle",
            "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, 6]}],
            "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 3]}],
            "parameters": {"sizes": {"batch": [1, 4]}, "axes": {"input": ["batch", 6]}},
        }  # fmt: skip
    index = client.ask("POST", "/v2/repository/index")[1]
    assert index == [{"name": "tiny", "version": "1", "state": "READY", "reason": ""}]


def test_answers_are_the_models(server: Server, eager: Any) -> None:
    client = Client(server.port)
    for count in (1, 3, 4, 9):
        rows = [[value + n for value in ROW] for n in range(count)]
        status, response, _ = client.infer(rows, id="mine")
        assert status == 200 and (response["model_name"], response["model_version"], response["id"]) == ("tiny", "1", "mine")
        [output] = response["outputs"]
        assert output["shape"] == [count, 3]
        assert output["data"] == pytest.approx((eager(rows) + 1).ravel().tolist(), abs=1e-5)


def test_bytes_both_ways(server: Server, eager: Any) -> None:
    data = struct.pack("<6f", *ROW)
    row = {"name": "input", "datatype": "FP32", "shape": [1, 6], "parameters": {"binary_data_size": 24}}
    text = json.dumps({"inputs": [row], "parameters": {"binary_data_output": True}}).encode()
    body, length = text + data, str(len(text))
    status, reply, headers = Client(server.port).ask("POST", "/v2/models/tiny/infer", body, Inference_Header_Content_Length=length)
    assert status == 200 and headers["content-type"] == "application/octet-stream"
    split = int(headers[HEADER.lower()])
    assert json.loads(reply[:split])["outputs"][0]["parameters"] == {"binary_data_size": 12}
    assert struct.unpack("<3f", reply[split:]) == pytest.approx((eager([ROW]) + 1)[0].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v2/models/other", 404, "no model 'other'; there are tiny"),
        ("GET", "/v2/models/tiny/versions/2", 404, "version '2' of 'tiny' does not serve; version 1 does"),
        ("POST", "/v2/models/tiny/versions/x/infer", 404, "version 'x' of 'tiny' does not serve; version 1 does"),
        ("POST", "/v2/models/other/ready", 405, "/v2/models/other/ready: the method POST is not allowed; use GET"),
        ("GET", "/nothing", 404, "no path /nothing; GET / lists the models and their paths"),
        ("GET", "/v1", 404, "no path /v1; GET / lists the models and their paths"),
        ("POST", "/v2/models/tiny/infer", 400, "the request is not JSON: Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_errors_are_the_protocols(server: Server, method: str, path: str, status: int, message: str) -> None:
    assert Client(server.port).ask(method, path)[:2] == (status, {"error": message})


def test_the_first_page_lists_the_paths(server: Server) -> None:
    client = Client(server.port)
    status, page, headers = client.ask("GET", "/")
    assert status == 200 and headers["content-type"] == "application/json"
    assert page["models"] == {"tiny": ["GET /v2/models/tiny", "POST /v2/models/tiny/infer"]} and "refused" not in page
    methods_and_paths = [line.split() for line in (*page["models"]["tiny"], *page["paths"])]
    for method, path in methods_and_paths:  # a path that does not exist would answer 404
        assert client.ask(method, path, b"" if method == "POST" else None)[0] in (200, 400), path


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 503, "no language model serves; "),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "no model 'other'; "),
        ("/v1/embeddings", {"input": "a"}, 400, "no model answers at /v1/embeddings: it needs a tokenizer beside its bundle; "),
    ],
)
def test_texts_for_a_server_of_tensors_are_sent_to_the_list(
    server: Server, path: str, body: Any, status: int, message: str
) -> None:
    answered, reply, _ = Client(server.port).ask("POST", path, body)
    assert (answered, reply["error"]["message"]) == (status, f"{message}GET / lists the models and their paths")


def test_what_the_model_refuses_names_the_input(server: Server) -> None:
    client = Client(server.port)
    status, response, _ = client.infer([])
    assert status == 400 and "batch" in response["error"] and "\n" not in response["error"]
    status, response, _ = client.ask("POST", "/v2/models/tiny/infer", b"{}", Content_Encoding="gzip")
    assert (status, response) == (415, {"error": "Content-Encoding: compressed bodies are not supported"})
    assert client.infer([ROW])[0] == 200, "the server goes on"


def test_prometheus_reads_what_happened(server: Server) -> None:
    client = Client(server.port)
    before = counted(client)
    assert client.infer([ROW] * 3)[0] == 200 and client.infer([ROW], outputs=[{"name": "?"}])[0] == 400
    assert client.infer([])[0] == 400, "the guards of the call refuse it, which computes nothing"
    after, owner = counted(client), 'model="tiny",version="1"'
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown[f'cgbundle_requests_total{{code="200",{owner}}}'] == 1
    assert grown[f'cgbundle_requests_total{{code="400",{owner}}}'] == 2
    assert grown[f"cgbundle_rows_total{{{owner}}}"] == 3 and grown[f"cgbundle_recorded_rows_total{{{owner}}}"] == 4
    assert grown[f"cgbundle_queue_seconds_count{{{owner}}}"] == grown[f"cgbundle_call_seconds_count{{{owner}}}"] == 1
    assert after[f'cgbundle_memory_bytes{{memory="weights",{owner}}}'] > 0
    assert after['cgbundle_load_seconds{model="tiny",phase="self_test",version="1"}'] > 0
    assert after['cgbundle_loads_total{model="tiny",result="serving"}'] == 1 and after[f"cgbundle_waiting_requests{{{owner}}}"] == 0


def counted(client: Client) -> dict[str, float]:
    """Returns the metrics, parsed by prometheus_client; labels are sorted by name."""
    parser = importlib.import_module("prometheus_client.parser")
    status, text, headers = client.ask("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    metrics = {}
    for kind in parser.text_string_to_metric_families(text.decode()):
        for sample in kind.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            metrics[f"{sample.name}{{{labels}}}"] = sample.value
    return metrics


# --- Triton's own client ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def triton() -> ModuleType:
    return pytest.importorskip("tritonclient.http", reason="pip install '.[dev]'")


def test_tritons_client_talks_to_it(server: Server, triton: ModuleType, eager: Any) -> None:
    import numpy

    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert (
        client.is_server_live()
        and client.is_server_ready()
        and client.is_model_ready("tiny")
        and client.is_model_ready("tiny", "1")
    )
    assert not client.is_model_ready("tiny", "2") and not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "cgbundle"
    assert client.get_model_metadata("tiny")["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 6]}]
    assert client.get_model_repository_index()[0]["state"] == "READY"
    client.load_model("tiny")
    x = numpy.random.default_rng(0).standard_normal((3, 6)).astype(numpy.float32)
    for sent in (True, False):
        for back in (True, False):
            tensor = triton.InferInput("input", x.shape, "FP32")
            tensor.set_data_from_numpy(x, binary_data=sent)
            wanted = [triton.InferRequestedOutput("output", binary_data=back)]
            answer = client.infer("tiny", [tensor], outputs=wanted, request_id="7", timeout=10_000_000)
            assert numpy.allclose(answer.as_numpy("output"), eager(x) + 1, atol=1e-5)
            assert (answer.get_response()["id"], answer.get_response()["model_version"]) == ("7", "1")
    answer = client.infer("tiny", [tensor], model_version="1")  # a request without outputs gets all outputs, as bytes
    assert answer.as_numpy("output").shape == (3, 3)


def test_tritons_client_understands_the_errors(server: Server, triton: ModuleType) -> None:
    import numpy

    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")

    def error_text(model: str, name: str, shape: tuple[int, ...], dtype: Any, datatype: str) -> str:
        tensor = triton.InferInput(name, shape, datatype)
        tensor.set_data_from_numpy(numpy.zeros(shape, dtype))
        with pytest.raises(importlib.import_module("tritonclient.utils").InferenceServerException) as caught:
            client.infer(model, [tensor])
        return f"{caught.value.status()} {caught.value.message()}"

    assert error_text("other", "input", (1, 6), numpy.float32, "FP32") == "404 no model 'other'; there are tiny"
    assert error_text("tiny", "x", (1, 6), numpy.float32, "FP32") == "400 input 'x': the model has no such input; it has input"
    assert error_text("tiny", "input", (1, 6), numpy.int64, "INT64") == "400 input 'input': datatype 'INT64', expected FP32"
    assert error_text("tiny", "input", (1, 7), numpy.float32, "FP32").startswith(
        "400 input 'input': shape [1, 7], expected [-1, 6]"
    )


def test_64_of_tritons_clients_get_their_own_answers(server: Server, triton: ModuleType, eager: Any) -> None:
    import numpy

    inputs = numpy.random.default_rng(1).standard_normal((64, 4, 2, 6)).astype(numpy.float32)
    wrong: list[str] = []

    def run(number: int) -> None:
        client = triton.InferenceServerClient(f"127.0.0.1:{server.port}", connection_timeout=60, network_timeout=60)
        for x in inputs[number]:
            tensor = triton.InferInput("input", x.shape, "FP32")
            tensor.set_data_from_numpy(x)
            got = client.infer("tiny", [tensor]).as_numpy("output")
            if not numpy.allclose(got, expected[number, len(seen[number])], atol=1e-5):
                wrong.append(f"{number}: {got}")
            seen[number].append(got)

    expected = eager(inputs.reshape(-1, 6)).reshape(64, 4, 2, 3) + 1
    seen: list[list[Any]] = [[] for _ in range(64)]
    threads = [threading.Thread(target=run, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and all(len(answers) == 4 for answers in seen)


# --- versions ---------------------------------------------------------------------------------------------------------


def swap_under_load(folder: Folder, server: Server, eager: Any, swaps: int, clients: int) -> SimpleNamespace:
    """Changes the version `swaps` times, up and down, while clients send requests without a pause. Returns their answers."""
    base = eager([ROW])[0]
    tally = SimpleNamespace(answers=0, failed=list[Any](), mixed=list[Any](), versions=set[int](), memory=list[int]())
    done, lock = threading.Event(), threading.Lock()

    def ask() -> None:
        client = Client(server.port)
        while not done.is_set():
            status, response, _ = client.infer([ROW, ROW])
            with lock:
                tally.answers += 1
                if status != 200:
                    tally.failed.append((status, response))
                    continue
                version = int(response["model_version"])
                tally.versions.add(version)
                if response["outputs"][0]["data"] != pytest.approx([*(base + version), *(base + version)], abs=1e-4):
                    tally.mixed.append(response)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    client = Client(server.port)
    for thread in threads:
        thread.start()
    try:
        for swap in range(swaps):
            number = 2 + swap // 2
            folder.take(number) if swap % 2 else folder.put(number)
            assert client.ask("POST", "/v2/repository/models/tiny/load")[0] == 200
            serving = client.ask("GET", "/v2/models/tiny")[1]["versions"]
            assert serving == ["1" if swap % 2 else str(number)], server.log[-3:]
            tally.memory.append(server.memory())
    finally:
        done.set()
        for thread in threads:
            thread.join()
    return tally


def test_versions_are_exchanged_under_load(folder: Folder, eager: Any) -> None:
    """No request fails, every answer comes from the one version that it names, and the old version's memory is freed."""
    with serving(folder.path / "models", "--poll", 3600) as server:
        server.ready()
        tally = swap_under_load(folder, server, eager, swaps=12, clients=8)
        assert tally.failed == [] and tally.mixed == [] and tally.answers > 12
        assert len(tally.versions) > 1
        threads = [int(path.name) for path in Path(f"/proc/{server.process.pid}/task").iterdir()]
        assert len(threads) < 40 and max(tally.memory[6:]) < 2 * max(tally.memory[:4]), tally.memory


def test_a_version_whose_self_test_fails_is_refused_and_the_old_one_stays(folder: Folder) -> None:
    with serving(folder.path / "models", "--poll", 0.1) as server:
        client = server.ready()
        try:
            folder.put(7, examined=False)
            event = server.said(lambda event: event["event"] == "refused")
            assert (event["model"], event["version"]) == ("tiny", 7) and event["why"].startswith(
                "the self-test fails at int_key (1,)"
            )
            broken = folder.path / "models" / "tiny" / "8" / "model.cgb"
            broken.mkdir(parents=True)
            (broken / "manifest.json").write_text("{}")
            event = server.said(lambda event: event["event"] == "refused" and event["version"] == 8)
            assert "hint" in event and "build it again" in event["hint"]
            time.sleep(0.5)
            assert len([entry for entry in server.log if entry["event"] == "refused"]) == 2, "each is tried once"
            assert client.infer([ROW])[1]["model_version"] == "1" and client.ask("GET", "/v2/health/ready")[0] == 200
            index = {row["version"]: row["state"] for row in client.ask("POST", "/v2/repository/index")[1]}
            assert index == {"1": "READY", "7": "UNAVAILABLE", "8": "UNAVAILABLE"}
            folder.take(7)
            folder.put(7)  # a valid version again
            assert server.said(lambda event: event["event"] == "serving" and event["version"] == 7)["before"] == 1
            assert client.infer([ROW])[1]["model_version"] == "7"
        finally:
            folder.take(7)
            folder.take(8)
        assert server.said(lambda event: event["event"] == "serving" and event["before"] == 7)["version"] == 1, "and back"
        assert client.infer([ROW])[1]["model_version"] == "1"


def test_models_come_and_go(folder: Folder, bundle: Path) -> None:
    models = folder.path / "models"
    with serving(models, "--poll", 0.1) as server:
        client = server.ready()
        shifted(bundle, folder.path / "made" / "5", 5.0)  # here the version's folder is the bundle itself
        (folder.path / "made").rename(models / "second")
        server.said(lambda event: event["event"] == "serving" and event["model"] == "second" and event["version"] == 5)
        assert client.ask("GET", "/v2/models/second")[1]["versions"] == ["5"]
        (models / "second").rename(folder.path / "made")
        server.said(lambda event: event["event"] == "gone")
        end = time.monotonic() + STARTS
        while client.ask("GET", "/v2/models/second")[0] != 404 and time.monotonic() < end:
            time.sleep(0.05)
        assert client.ask("GET", "/v2/models/second")[1] == {"error": "no model 'second'; there are tiny"}


# --- limits and shutdown ----------------------------------------------------------------------------------------------


def at_once(server: Server, clients: int, **more: Any) -> list[tuple[int, Any, dict[str, str]]]:
    """Returns the answers to this number of simultaneous clients."""
    answers: list[tuple[int, Any, dict[str, str]]] = []
    barrier = threading.Barrier(clients)

    def ask() -> None:
        client = Client(server.port)
        barrier.wait()
        answers.append(client.infer([ROW], **more))

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_too_many_requests_get_429_and_late_ones_504(folder: Folder) -> None:
    """Requests wait up to 10 s until a batch of 4 is full, or until their own timeout of 2 s."""
    with serving(folder.path / "models", "--wait", 10_000, "--queue", 2, "--largest", 1) as server:
        client = server.ready()
        answers = at_once(server, 6, parameters={"timeout": 2_000_000})
        assert sorted({status for status, _, _ in answers}) == [429, 504]
        for status, body, headers in answers:
            if status == 429:
                assert body == {"error": "2 requests wait already"} and int(headers["retry-after"]) >= 1
            else:
                assert body == {"error": "no answer within 2 s"}
        status, body, _ = client.ask("POST", "/v2/models/tiny/infer", bytes((1 << 20) + 1))
        assert (status, body) == (413, {"error": "body: more than 1048576 bytes"})


def test_shutdown_answers_waiting_requests(folder: Folder) -> None:
    with serving(folder.path / "models", "--wait", 1500) as server:
        client = server.ready()
        statuses: list[int] = []
        asking = threading.Thread(target=lambda: statuses.append(Client(server.port).infer([ROW])[0]))
        asking.start()
        while not statuses and b'cgbundle_waiting_requests{model="tiny",version="1"} 1.0' not in client.ask("GET", "/metrics")[1]:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        asking.join()
        assert statuses == [200] and server.process.wait(60) == 0
        assert [event["event"] for event in server.log] == ["listening", "serving"]


def test_a_server_without_models_is_live(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    with serving(tmp_path / "models", "--poll", 3600) as server:
        client = Client(server.port)
        assert client.ask("GET", "/v2/health/live")[0] == 200
        assert client.ask("GET", "/v2/models/m")[1] == {"error": "no model 'm'; there are none"}


# --- what is served, and how --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def versions() -> ModuleType:
    return importlib.import_module("cgserve.tensors.entry")


def described(**changes: Any) -> Any:
    """Returns the result of `describe` for an entry x [batch, 3] -> y [batch]."""
    entry = {
        "name": "forward", "mutated_buffers": (), "mutated_inputs": (), "data_sizes": (),
        "dimensions": (Dimension(name="batch", sizes=(1, 4), pad="rows", chunk=True, reason=""),),
        "inputs": (TensorSpec(name="x", dtype="float32", shape=("batch", 3), order=(0, 1)),),
        "outputs": (TensorSpec(name="y", dtype="int64", shape=("batch",), order=(0,)),),
    }  # fmt: skip
    random = changes.pop("random", None)
    return importlib.import_module("cgserve.tensors.entry").describe(SimpleNamespace(**(entry | changes)), random)


def test_which_entries_can_be_batched(versions: ModuleType) -> None:
    whole = TensorSpec(name="y", dtype="int64", shape=(3,), order=(0,))
    squared = TensorSpec(name="y", dtype="int64", shape=("batch", ("*", "batch", 2)), order=(0, 1))
    still = Dimension(
        name="batch",
        sizes=(1, 4),
        pad="no",
        chunk=False,
        reason="rows depend on each other",
        not_chunked="rows depend on each other",
    )
    assert described().batches == (1, 4)
    for changes in ({"outputs": (whole,)}, {"outputs": (squared,)}, {"dimensions": (still,)}, {"dimensions": ()}):
        assert described(**changes).batches == ()
    assert [versions.recorded_rows(rows, (1, 4)) for rows in (1, 2, 4, 5, 9, 10)] == [1, 4, 4, 5, 9, 12]
    assert versions.recorded_rows(7, ()) == 7


def test_what_the_protocol_has_no_words_for(versions: ModuleType) -> None:
    small = TensorSpec(name="x", dtype="float8_e5m2", shape=("batch", 3), order=(0, 1))
    with pytest.raises(versions.NotServable, match="x is float8_e5m2, which the protocol does not have"):
        described(inputs=(small,))
    for changes in ({"mutated_buffers": (2,)}, {"mutated_inputs": (0,)}):
        with pytest.raises(versions.NotServable, match="calls change its state or its inputs"):
            described(**changes)
    assert described(mutated_buffers=(2,), random=2).batches == (1, 4)


def test_axes_in_metadata(versions: ModuleType) -> None:
    """In metadata, a fixed axis is a number."""
    mixed = TensorSpec(name="x", dtype="float32", shape=("batch", 3, ("+", ("*", "seq", 2), 1)), order=(0, 1, 2))
    [port] = described(inputs=(mixed,)).inputs
    assert (port.shape, port.axes) == ((-1, 3, -1), ("batch", 3, "2*seq+1"))
    boxes = TensorSpec(name="boxes", dtype="float32", shape=(100, 4), order=(0, 1))
    count = TensorSpec(name="boxes.rows", dtype="int64", shape=(), order=())
    sized = described(outputs=(boxes, count), data_sizes=(DataSize(output=0, axis=0, count=1),))
    assert [(port.shape, port.axes) for port in sized.outputs] == [((-1, 4), ("<=100", 4)), ((), ())]


def test_devices_are_numbers(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / folder) for folder in (".", "cli", "bundles")])}
    command = [sys.executable, "-m", "cgcompile_cli", "serve", str(tmp_path), "--devices", "0,one"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "error: --devices 0,one: expected numbers of GPUs, as in 0,1"


# --- a GPU that fails ---------------------------------------------------------------------------------------------------


def test_a_server_whose_gpu_fails_ends_itself_with_the_drivers_error(folder: Folder, tmp_path: Path) -> None:
    flag = tmp_path / "failed"
    server = Server(tmp_path / "models", flag, script=("-m", "tests.helpers.drivers.failing_gpu"))
    try:
        client = server.ready()
        asked = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [64], "data": list(range(64))}]}
        response = client.ask("POST", "/v2/models/twice/infer", asked)
        assert response[0] == 200 and response[1]["outputs"][0]["data"] == [2.0 * value for value in range(64)]
        flag.touch()
        status, response, headers = client.ask("POST", "/v2/models/twice/infer", asked)
        assert (status, response) == (503, {"error": "the GPU failed, and this server ends"}) and headers["retry-after"] == "1"
        failed = server.said(lambda event: event["event"] == "gpu-failed")
        assert failed["model"] == "twice" and "CUDA_ERROR_LAUNCH_FAILED" in failed["why"]
        assert server.process.wait(STARTS) == 2
        server._reading.join(5)
        assert [event["text"].strip() for event in server.log if event["event"] == "text"] == [
            f"error: the GPU failed: {failed['why']}",
            "hint: start the server again: this process has lost the GPU",
        ]
    finally:
        server.stop()


def test_the_watch_of_the_folder_survives_what_a_look_raises(tmp_path: Path) -> None:
    repository = importlib.import_module("cgserve.models.model_repository")
    options, watch = repository.Options(wait=0.0), repository.Watch()
    looks, events = list[int](), list[Any]()

    def look() -> Any:
        looks.append(1)
        if len(looks) == 2:
            raise MemoryError
        return repository.scan(tmp_path)

    async def run() -> None:
        async with repository.Repository(look, options, 0.01, watch, events.append) as served:
            while len(looks) < 4:
                await asyncio.sleep(0.01)
            assert served.models == {}

    asyncio.run(run())
    assert events == [{"event": "failed", "why": "MemoryError"}]


def test_each_entry_is_a_model_of_its_own_name(tmp_path: Path) -> None:
    """An entry that changes state is not served, and the log tells why; `--name` sets the served name."""
    skip_older_torch()
    with serving(GOLDEN / "v1" / "cpu_entries.cgb", "--name", "two") as server:
        client = server.ready()
        message = server.said(lambda event: event["event"] == "serving")
        assert message["entries"] == ["two.forward"] and message["not_served"]["fill"].startswith("its calls change its state")
        assert client.ask("GET", "/v2/models/two.forward")[1]["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
        row = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.0] * 16}
        status, message, _ = client.ask("POST", "/v2/models/two.forward/infer", {"inputs": [row]})
        assert status == 200 and message["model_name"] == "two.forward" and message["outputs"][0]["shape"] == [1, 4]
        for name, text in (
            ("two", "'two' has several entries, each of which is a model: two.forward"),
            ("two.fill", "no model 'two.fill'"),
        ):
            status, message, _ = client.ask("POST", f"/v2/models/{name}/infer", {"inputs": [row]})
            assert status == 404 and message["error"].startswith(text)
        assert client.ask("GET", "/v2/models/two.forward/ready")[0] == client.ask("GET", "/v2/models/two/ready")[0] == 200
        assert client.ask("POST", "/v2/repository/index")[1][0]["name"] == "two.forward"


def test_a_bundle_that_cannot_be_served_ends_the_server(bundle: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.cgb"
    shifted(bundle, broken, 1.0, examined=False)
    server = Server(broken)
    try:
        assert server.process.wait(STARTS) == 2
        server._reading.join(5)
        assert server.log[-2]["text"].startswith("error: the self-test fails at int_key (1,)")
    finally:
        server.stop()
    path = os.pathsep.join([str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "cgcompile_cli", "serve", str(broken), "--port", "0"]
    text = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False).stderr
    assert text.count("the self-test fails at int_key (1,)") == 1, "a log in text does not repeat the error"


def test_memory_is_bounded_and_all_models_may_have_to_serve(bundle: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(bundle, tmp_path / "models" / name / "1" / "model.cgb")
    size = sum(dict(archive.read_manifest(str(bundle)).memories).values())
    with serving(tmp_path / "models", "--memory", f"{size * 3 // 2}B", "--ready", "all") as server:
        refused = server.said(lambda event: event["event"] == "refused")
        assert refused["why"].startswith("the bundle needs 0.0 MiB;") and refused["hint"] == "raise --memory"
        served = server.said(lambda event: event["event"] == "serving")["model"]
        client = Client(server.port)
        end = time.monotonic() + STARTS
        while client.ask("GET", "/v2/health/ready")[1]["error"] == "the models are being loaded" and time.monotonic() < end:
            time.sleep(0.02)
        status, response, _ = client.ask("GET", "/v2/health/ready")
        assert (status, response["error"]) == (503, f"no version serves of {refused['model']}") and served != refused["model"]
        assert client.ask("GET", "/health")[1]["ready"] is False and client.ask("GET", "/v2/health/live")[0] == 200


def test_keys_numbers_and_origins(bundle: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\n\nsecond\n")
    with serving(bundle, "--api-key-file", keys, "--cors", "https://page.example") as server:
        client = server.ready()
        for path, form in (("/v2/models/tiny", str), ("/v1/models", dict), ("/metrics", str)):
            status, response, headers = client.ask("GET", path)
            assert status == 401 and isinstance(response["error"], form) and headers["www-authenticate"] == "Bearer"
        assert client.ask("GET", "/v2/models/tiny", Authorization="Bearer third")[0] == 401
        for key in ("first", "second"):
            assert client.ask("GET", "/v2/models/tiny", Authorization=f"Bearer {key}")[0] == 200
        assert client.ask("GET", "/health", X_Request_Id="mine")[2]["x-request-id"] == "mine"
        assert len(client.ask("GET", "/health")[2]["x-request-id"]) == 32
        asked = {"Origin": "https://page.example", "Access_Control_Request_Method": "POST"}
        assert client.ask("OPTIONS", "/v1/completions", **asked)[2]["access-control-allow-origin"] == "https://page.example"
        asked["Origin"] = "https://other.example"
        assert "access-control-allow-origin" not in client.ask("OPTIONS", "/v1/completions", **asked)[2]


def test_one_bad_model_does_not_make_the_server_unready(bundle: Path, tmp_path: Path) -> None:
    folder = Folder(tmp_path, bundle)
    folder.put(1)
    bad = tmp_path / "models" / "bad" / "1" / "model.cgb"
    bad.mkdir(parents=True)
    (bad / "manifest.json").write_text("{}")
    with serving(tmp_path / "models") as server:
        client = server.ready()
        assert client.ask("GET", "/v2/models/tiny/ready")[0] == 200
        assert client.ask("GET", "/v2/models/bad/ready")[0] == 503
