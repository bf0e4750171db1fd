"""Measures requests per second of `cgcompile serve` with one GPU, and with a replica of the model on each of several.

    python -m tests.bench.server.llm_replicas --write FOLDER       writes a Llama with random weights and a byte tokenizer
    python -m tests.bench.server.llm_replicas BUNDLE FOLDER [--devices 0,1]

The same clients send greedy requests without a pause, first to one GPU and then to several.  They run in their own processes.
Server and clients use different processors (`--cores N`: the server's).  Each run takes `--seconds` after `--warm` seconds that
do not count.  Answers that differ from the first answer to their prompt are counted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.helpers.models.random_llama import write_llama

PROMPTS, VOCABULARY = 64, 256

SHAPE = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}  # fmt: skip
"""The layers are as wide as in a 7B model, so that the GPU dominates a call. There are few of them, so that the build is short."""


def started(bundle: str, tokenizer: str, devices: str, cores: set[int], turns: int) -> tuple[subprocess.Popen[str], str]:
    """Starts a server and returns it with host:port."""
    command = [sys.executable, "-m", "cgcompile_cli", "serve", bundle, "--tokenizer", tokenizer, "--port", "0", "--name", "llm"]
    command += ["--turns", str(turns), "--devices", devices, "--queue", "512"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cores))
    assert process.stderr is not None
    line, serving = process.stderr.readline(), process.stderr.readline()
    if not serving.startswith("serving "):
        raise SystemExit(line + serving + process.stderr.read())
    return process, line.split()[-1].removeprefix("http://")


def ask(address: str, options: dict[str, Any], threads: int, first: int, begin: float, until: float, cores: set[int]) -> list[Any]:
    """Runs the clients of one process. Returns the number of answers, the number of different answers, and the total seconds."""
    os.sched_setaffinity(0, cores)
    counts, wrong, spent = [0] * threads, [0] * threads, [0.0] * threads
    known: dict[int, str] = {}

    def client(number: int) -> None:
        connection, turn = http.client.HTTPConnection(address, timeout=60), 0
        while (began := time.monotonic()) < until:
            prompt = (first + 7 * number + turn) % PROMPTS
            turn += 1
            ids = [(31 * prompt + 17 * place + place * place) % VOCABULARY for place in range(options["prompt"])]
            body = {"model": "llm", "prompt": ids, "max_tokens": options["tokens"], "temperature": 0}
            connection.request("POST", "/v1/completions", json.dumps(body))
            answer = connection.getresponse()
            response = json.loads(answer.read())
            if answer.status != 200:
                raise SystemExit(str(response))
            now = time.monotonic()
            wrong[number] += response["choices"][0]["text"] != known.setdefault(prompt, response["choices"][0]["text"])
            if begin <= now < until:
                counts[number] += 1
                spent[number] += now - began

    workers = [threading.Thread(target=client, args=(number,)) for number in range(threads)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    return [sum(counts), sum(wrong), sum(spent)]


def rate(bundle: str, tokenizer: str, devices: str, args: argparse.Namespace) -> float:
    """Returns answers per second."""
    all_cores = sorted(os.sched_getaffinity(0))
    server_cores, client_cores = set(all_cores[: args.cores]), set(all_cores[args.cores :]) or set(all_cores)
    server, address = started(bundle, tokenizer, devices, server_cores, args.turns)
    try:
        begin = time.monotonic() + args.warm
        until, threads = begin + args.seconds, args.clients // args.processes
        with get_context("spawn").Pool(args.processes) as pool:
            rows = pool.starmap(
                ask, [(address, vars(args), threads, 13 * number, begin, until, client_cores) for number in range(args.processes)]
            )
        with open(f"/proc/{server.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        busy = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    finally:
        server.terminate()
        server.wait()
    counts, wrong, spent = [sum(column) for column in zip(*rows, strict=True)]
    speed = counts / args.seconds
    print(
        f"devices {devices}: {speed:.1f} answers/s, {speed * args.tokens:.0f} tokens/s, "
        f"{1000 * spent / max(1, counts):.0f} ms each, {wrong} unlike the first; the server's processor {busy:.1f} s",
        flush=True,
    )
    return speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("tokenizer", nargs="?")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--clients", type=int, default=96)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warm", type=float, default=4.0)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--cores", type=int, default=8)
    args = parser.parse_args()
    if args.write:
        write_llama(Path(args.bundle), SHAPE)
        return
    one, several = [rate(args.bundle, args.tokenizer, devices, args) for devices in (args.devices.split(",")[0], args.devices)]
    count = len(args.devices.split(","))
    print(f"prompts of {args.prompt}, {args.tokens} tokens: {count} GPUs {several / one:.2f} times one", flush=True)


if __name__ == "__main__":
    main()
