"""Sends many requests to `cgcompile serve` with OpenAI's client.

    python -m tests.bench.server.llm BUNDLE TOKENIZER [--requests 10000] [--clients 64]

First `--clients` clients send greedy requests with random prompts and lengths at once. Then each request is sent again alone: the
texts must be equal. Then `--requests` requests follow, a third of which disconnect after some tokens.  At the end no page may be in
use; the process's memory is printed before and after.  Last, the server is killed and started again.  Needs `openai`.
"""

from __future__ import annotations

import argparse
import atexit
import json
import random
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ,."


class Served:
    """A server process; `seconds` is the time from its start to its first answer."""

    def __init__(self, bundle: str, tokenizer: str) -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", "cgcompile_cli", "serve", bundle, "--tokenizer", tokenizer, "--name", "llm"]
        command += ["--port", "0", "--threads", "1"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        atexit.register(self.process.kill)  # ends the server even if this program fails
        assert self.process.stderr is not None
        line, serving = self.process.stderr.readline(), self.process.stderr.readline()
        if not serving.startswith("serving "):
            raise SystemExit(line + serving + self.process.stderr.read())
        self.address = line.split()[-1]
        self.client = openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=20, timeout=120)
        urllib.request.urlopen(
            urllib.request.Request(f"{self.address}/v1/completions", json.dumps({"prompt": "a", "max_tokens": 1}).encode())
        ).read()
        self.seconds = time.perf_counter() - began

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.address}/health") as answer:
            status: dict[str, Any] = json.loads(answer.read())
        return status | status["models"]["llm"]

    def resident(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/status").read_text().split("\n")
        return int(next(line for line in fields if line.startswith("VmRSS")).split()[1]) / 1024

    def text(self, prompt: str, count: int) -> str:
        completion = self.client.completions.create(model="llm", prompt=prompt, max_tokens=count, temperature=0)
        return completion.choices[0].text

    def leaves(self, prompt: str, count: int, after: int) -> None:
        """Opens a stream and disconnects after `after` events."""
        with self.client.completions.create(model="llm", prompt=prompt, max_tokens=count, temperature=0.8, stream=True) as stream:
            for number, _ in enumerate(stream):
                if number >= after:
                    return


def asked(order: random.Random, longest: int) -> tuple[str, int]:
    """Returns a random prompt and a length, together at most `longest` tokens."""
    size = order.randrange(1, longest // 2)
    return "".join(order.choices(LETTERS, k=size)), order.randrange(1, longest // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("tokenizer")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--longest", type=int, default=40, help="tokens of prompt and answer")
    options = parser.parse_args()
    server = Served(options.bundle, options.tokenizer)
    print(f"process start to first answer {server.seconds:.2f} s; torch imported: {server.health()['torch']}", flush=True)
    order = random.Random(0)
    wanted = [asked(order, options.longest) for _ in range(options.clients)]
    with ThreadPoolExecutor(options.clients) as threads:
        together = list(threads.map(lambda request: server.text(*request), wanted))
    same = sum(text == server.text(*request) for request, text in zip(wanted, together, strict=True))
    print(f"{options.clients} clients at once: {same} texts as each alone", flush=True)
    pages, memory, began = server.health()["pages_free"], server.resident(), time.perf_counter()

    def one(number: int) -> bool:
        rng = random.Random(number)
        prompt, count = asked(rng, options.longest)
        leaves = rng.random() < 0.34
        if leaves:
            server.leaves(prompt, count, rng.randrange(0, 6))
        else:
            server.text(prompt, count)
        return leaves

    with ThreadPoolExecutor(options.clients) as threads:
        left = sum(threads.map(one, range(options.requests)))
    seconds = time.perf_counter() - began
    deadline = time.monotonic() + 30
    while server.health()["pages_used"] and time.monotonic() < deadline:
        time.sleep(0.1)
    health = server.health()
    print(
        f"{options.requests} requests in {seconds:.0f} s, {left} of them left early: pages taken {health['pages_used']}, "
        f"free {health['pages_free']} (before: {pages}), resident {server.resident():.1f} MiB (before: {memory:.1f})",
        flush=True,
    )
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    again = Served(options.bundle, options.tokenizer)
    print(f"killed and started again: first answer after {again.seconds:.2f} s", flush=True)
    again.process.terminate()
    again.process.wait()
    if same != options.clients or health["pages_used"] or health["pages_free"] != pages:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
