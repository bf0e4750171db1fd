"""`python -m tests.bench.server.switches [--requests 100000]`: replaces model versions under load and looks for leaks in the
server.

One server has three models: an MLP (Open Inference Protocol), an embedding model of texts, and a Llama of one layer (streams of
OpenAI's completions). Clients send requests to all of them without a pause and abandon a third of the requests at random. Every ten
seconds all models get a new version. Every complete answer must come from exactly one version. At the end no page, file or thread
may have leaked.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.common import children
from tests.helpers.bundles import llama_bundle
from tests.helpers.models.tokenizers import write_tokenizer

LEAVES, LONG = 1 / 3, 120.0
LETTERS = "abcdefghijklmnopqrstuvwxyz"
KINDS = {"rows": 0.6, "texts": 0.25, "llama": 0.15}
"""Shares of the requests."""

POOL = 6
"""Threads that asyncio's default pool may add during the test, on two processors."""

VERSIONED = """
import torch
from torch import nn

VERSION = {version}


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(x) * 0 + x[:, :3] + VERSION


class Texts(nn.Module):
    def forward(self, input_ids, attention_mask):
        kept = (input_ids * attention_mask).to(torch.float32)
        return torch.stack([kept.sum(1), attention_mask.sum(1) + 0.0, kept.sum(1) * 0 + VERSION], 1)


def model():
    return {model}().eval()


def inputs({parameters}):
    return {inputs}
"""
"""A model whose answers contain its version."""

ROWS = {"model": "Rows", "parameters": "batch", "inputs": "(torch.randn(batch, 6),)"}
TEXTS = {
    "model": "Texts", "parameters": "batch, seq",
    "inputs": "(torch.randint(0, 100, (batch, seq)), torch.ones(batch, seq, dtype=torch.int64))",
}  # fmt: skip
SIZES = {"rows": ("batch=1,8",), "texts": ("batch=1,8", "seq=8,32")}


class Memory(NamedTuple):
    """Resources of the server's process: MiB, threads, open files."""

    mib: int
    threads: int
    files: int


def build(folder: Path) -> None:
    """Builds two bundles of each model, `rows-0.cgb`, `rows-1.cgb`, ..."""
    for version in (0, 1):
        for name, form in (("rows", ROWS), ("texts", TEXTS)):
            source = folder / f"{name}.py"
            source.write_text(VERSIONED.format(version=version, **form))
            sizes = [word for size in SIZES[name] for word in ("--sizes", size)]
            out = folder / f"{name}-{version}.cgb"
            if not out.exists():
                command = [sys.executable, "-m", "cgcompile_cli", "build", str(source), *sizes, "--target", "cpu", "--quiet"]
                subprocess.run([*command, "-o", str(out)], check=True, env=children.environment())
        if not (folder / f"llama-{version}.cgb").exists():
            with tempfile.TemporaryDirectory() as place:
                llama_bundle.build(Path(place), seed=version)
                shutil.move(Path(place) / "llama.cgb", folder / f"llama-{version}.cgb")


class Served:
    """`cgcompile serve` over a folder of models, whose versions `switch` replaces."""

    def __init__(self, bundles: Path, folder: Path) -> None:
        self.bundles, self.models, self.number = bundles, folder / "models", 0
        for name in KINDS:
            (self.models / name).mkdir(parents=True)
        write_tokenizer(self.models / "llama", letters=120)
        write_tokenizer(self.models / "texts")
        self._put()
        command = [sys.executable, "-m", "cgcompile_cli", "serve", str(self.models), "--port", "0", "--poll", "3600"]
        self.log = open(folder / "log", "w+")  # noqa: SIM115  the server writes to it until it ends
        self.process = subprocess.Popen([*command, "--threads", "1"], stderr=self.log, env=children.environment())
        until = time.monotonic() + LONG
        while self.said().count("serving ") < len(KINDS):
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(self.said())
            time.sleep(0.1)
        self.port = int(self.said().splitlines()[0].rpartition(":")[2])

    def said(self) -> str:
        return Path(self.log.name).read_text()

    def _put(self) -> None:
        """Adds version number+1 of every model; weights alternate between the two bundles."""
        for name in KINDS:
            staging = self.models.parent / "made"
            shutil.copytree(self.bundles / f"{name}-{self.number % 2}.cgb", staging / "model.cgb")
            staging.rename(self.models / name / str(self.number + 1))
        self.number += 1

    def switch(self) -> None:
        """Adds a version, waits until it serves, and removes the previous one."""
        self._put()
        for name in KINDS:
            ask(self.port, f"/v2/repository/models/{name}/load", {})
            gone = self.models.parent / "gone"
            (self.models / name / str(self.number - 1)).rename(gone)
            shutil.rmtree(gone)

    def memory(self) -> Memory:
        place = Path(f"/proc/{self.process.pid}")
        fields = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
        return Memory(int(fields["VmRSS"].split()[0]) >> 10, int(fields["Threads"]), len(os.listdir(place / "fd")))


def ask(port: int, path: str, body: Any) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG)
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    payload = answer.read()
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"{path}: {answer.status} {payload.decode()}")
    return json.loads(payload or b"null")


class Clients:
    """Threads that send `requests` requests in all. `counts` holds how they ended; `wrong` lists errors and must stay empty."""

    def __init__(self, server: Served, prompts: dict[str, tuple[str, str]]) -> None:
        """`prompts` maps each prompt to the answers of both versions of the Llama."""
        self.server, self.prompts = server, prompts
        self.counts, self.wrong, self.asked = Counter[str](), list[str](), 0
        self._lock = threading.Lock()

    def run(self, clients: int, requests: int) -> list[threading.Thread]:
        self._left = requests
        threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(clients)]
        for thread in threads:
            thread.start()
        return threads

    def _ask(self, seed: int) -> None:
        order = random.Random(seed)
        while True:
            with self._lock:
                if not self._left:
                    return
                self._left -= 1
            kind = order.choices(list(KINDS), list(KINDS.values()))[0]
            try:
                ended = getattr(self, f"_{kind}")(order)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                ended = f"{type(error).__name__}: {error}"
            with self._lock:
                self.asked += 1
                fine = ended in ("right", "left")
                self.counts[f"{kind}: {ended if fine else 'wrong'}"] += 1
                if not fine:
                    self.wrong.append(f"{kind}: {ended}")

    def _post(self, order: random.Random, path: str, body: Any, pause: float) -> bytes | None:
        """Returns the body of the answer, or None if the client disconnected. Raises ValueError if the status is not 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=LONG)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            if order.random() < LEAVES:
                time.sleep(order.random() * pause)
                return None
            answer = connection.getresponse()
            payload = answer.read()
            if answer.status != 200:
                raise ValueError(f"{answer.status} {payload.decode()}")
            return payload
        finally:
            connection.close()

    def _rows(self, order: random.Random) -> str:
        rows = [[order.randrange(100) + 0.0 for _ in range(6)] for _ in range(order.randrange(1, 4))]
        row = {"name": "x", "datatype": "FP32", "shape": [len(rows), 6], "data": rows}
        payload = self._post(order, "/v2/models/rows/infer", {"inputs": [row]}, 0.02)
        if payload is None:
            return "left"
        response = json.loads(payload)
        version = (int(response["model_version"]) - 1) % 2
        expected = [number + version for values in rows for number in values[:3]]
        return "right" if response["outputs"][0]["data"] == expected else f"{rows}: {response}"

    def _texts(self, order: random.Random) -> str:
        texts = ["".join(order.choices(LETTERS, k=order.randrange(1, 30))) for _ in range(order.randrange(1, 40))]
        payload = self._post(order, "/v1/embeddings", {"model": "texts", "input": texts}, 0.05)
        if payload is None:
            return "left"
        embeddings = [entry["embedding"] for entry in json.loads(payload)["data"]]
        sizes = [row[1] for row in embeddings] == [len(text) for text in texts]
        return "right" if sizes and len({row[2] for row in embeddings}) == 1 else f"{texts}: {embeddings}"

    def _llama(self, order: random.Random) -> str:
        prompt = order.choice(list(self.prompts))
        body = {"model": "llama", "prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": True}
        leaves = order.randrange(0, 4) if order.random() < LEAVES else None
        connection, text = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=LONG), ""
        try:
            connection.request("POST", "/v1/completions", json.dumps(body))
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"{answer.status} {answer.read().decode()}")
            for number, line in enumerate(answer):
                if leaves is not None and number >= leaves:
                    return "left"
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                elif line.startswith(b"data: [DONE]"):
                    return "right" if text in self.prompts[prompt] else f"{prompt!r}: {text!r}"
            return f"{prompt!r}: no end"
        finally:
            connection.close()


def answers(port: int, prompts: list[str]) -> list[str]:
    body = {"model": "llama", "max_tokens": 24, "temperature": 0}
    return [ask(port, "/v1/completions", body | {"prompt": prompt})["choices"][0]["text"] for prompt in prompts]


def main() -> int:
    parser = argparse.ArgumentParser("tests.bench.server.switches", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two versions")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench/switches"), help="where the bundles are kept")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    build(options.cache)
    order = random.Random(0)
    prompts = ["".join(order.choices(LETTERS, k=order.randrange(2, 30))) for _ in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        server = Served(options.cache.resolve(), Path(folder))
        try:
            return drive(server, prompts, options)
        finally:
            server.process.kill()
            server.process.wait()
            server.log.close()


def drive(server: Served, prompts: list[str], options: argparse.Namespace) -> int:
    first = answers(server.port, prompts)
    server.switch()
    second = answers(server.port, prompts)
    apart = sum(a != b for a, b in zip(first, second, strict=True))
    print(f"two versions: {apart} of {len(prompts)} prompts are answered otherwise", flush=True)
    clients = Clients(server, dict(zip(prompts, zip(first, second, strict=True), strict=True)))
    for thread in clients.run(options.clients, min(2000, options.requests)):  # not measured: memory pools grow at first
        thread.join()
    time.sleep(2)
    before, began = server.memory(), time.monotonic()
    clients.asked = 0
    clients.counts.clear()
    threads = clients.run(options.clients, options.requests)
    switches = 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(options.every)
        server.switch()
        switches += 1
        if not switches % 6:
            print(f"{clients.asked} requests, {switches} switches, {server.memory()}", flush=True)
    seconds = time.monotonic() - began
    time.sleep(3)
    after, health = server.memory(), ask(server.port, "/health", None)
    pages = health["models"]["llama"]["pages_used"]
    print(f"{clients.asked} requests in {seconds:.0f} s, {switches} switches of three models")
    print(dict(sorted(clients.counts.items())))
    print(f"before {before}, after {after}; pages taken {pages}; wrong: {clients.wrong[:5]}")
    leaks = after.threads > before.threads + POOL or after.files > before.files or pages or after.mib > before.mib + 64
    return int(bool(clients.wrong) or clients.asked != options.requests or bool(leaks) or apart < len(prompts) // 2)


if __name__ == "__main__":
    sys.exit(main())
