"""The server of examples/serve.py under 64 concurrent HTTP clients on MiniLM, beside the same server on eager PyTorch.

    python tests/bench/server/load.py --cache .cache/bench
    python tests/bench/server/load.py --bundle minilm_gpu.cgb --device cuda --compile --tolerance 1e-3

Every answer is compared with eager PyTorch's for that text alone; one that differs ends the benchmark.  Clients are threads of this
process, each with a connection that it keeps and its next request as soon as the last was answered.  The servers take turns, a
round each.
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
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgbundle.format.archive import read_manifest
from tests.bench.common import cases, children, report, serving

BATCHES, LENGTHS = (1, 2, 4, 6, 8), (8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)
"""On a CPU one lowering is for all sizes: more of them cost nothing, and fewer rows and tokens are computed for nothing."""

CASE = cases.Case(
    name="minilm",
    sizes=(f"batch={','.join(map(str, BATCHES))}", f"seq={','.join(map(str, LENGTHS))}"),
    key=(1, 16),
    own_weights=True,
)
TEXTS = 256
TOLERANCE = 1e-5
"""Of an element of an embedding, whose length is 1, by default: examples/demo.py allows the same."""

WORDS = (  # noqa: SIM905
    "the cat sleeps on a windowsill while rain falls over old roofs and nobody asks why prices rose again after banks raised "
    "their rates last year so people read long reports about small engines quiet rivers new software and how to reset a password"
).split()


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running server: its process, its port, and seconds from the start of its process to its first answer."""

    name: str
    process: subprocess.Popen[str]
    port: int
    start: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """`seconds` in all, and of the processors for the server; of every request its latency in seconds, the text's number and the
    answer's body."""

    seconds: float
    processor: float
    answers: tuple[tuple[float, int, bytes], ...]


def texts() -> list[str]:
    """The same sentences in every run: 3 to 100 words, half of them shorter than 14."""
    draw = random.Random(0)
    lengths = [min(100, max(3, round(draw.lognormvariate(2.6, 0.7)))) for _ in range(TEXTS)]
    return [" ".join(draw.choices(WORDS, k=length)) + "." for length in lengths]


def references(sentences: Sequence[str]) -> list[list[float]]:
    """Eager PyTorch's embedding of every sentence alone, from a process of its own: torch stays out of this one."""
    program = (
        "import json, sys, minilm, torch\n"
        "network, found = minilm.model(), []\n"
        "with torch.inference_mode():\n"
        "    for text in json.load(sys.stdin):\n"
        "        found.append(network(*map(torch.from_numpy, minilm.tokenize([text])))[0].tolist())\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=children.ROOT / "examples", input=json.dumps(sentences), env=children.environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise children.ChildFailed(done.stderr)
    return json.loads(done.stdout)


@contextmanager
def running(name: str, command: Sequence[str], sentence: str, threads: int) -> Iterator[Server]:
    """A server until the end of the block, whose model computes in `threads` threads.  Raises ChildFailed where it does not start,
    or does not end well."""
    environment = children.environment({"OMP_NUM_THREADS": str(threads)})
    begin = float(environment[serving.SPAWNED])
    process = subprocess.Popen([sys.executable, *command], env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        if "http://" not in said:
            raise children.ChildFailed(f"{name}: {said}{process.stderr.read()}")
        port = int(said.rsplit(":", 1)[1])
        post(http.client.HTTPConnection("127.0.0.1", port), sentence)
        yield Server(name=name, process=process, port=port, start=serving.now() - begin)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        if process.wait(30) or said:
            raise children.ChildFailed(f"{name}: ended with {process.returncode}\n{said}")
    finally:
        process.kill()
        process.wait()


def post(connection: http.client.HTTPConnection, text: str) -> bytes:
    """The answer's body.  Raises ChildFailed where it is no 200."""
    connection.request("POST", "/embed", json.dumps({"text": text}), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise children.ChildFailed(f"{answer.status}: {body.decode()}")
    return body


def health(server: Server) -> dict[str, Any]:
    """What the server says of itself."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/health")
    return json.loads(connection.getresponse().read())


def drive(server: Server, sentences: Sequence[str], clients: int, each: int) -> Round:
    """`clients` threads send `each` requests, all starting at once."""
    found: list[list[tuple[float, int, bytes]]] = [[] for _ in range(clients)]
    failed: list[BaseException] = []
    start = threading.Barrier(clients + 1)

    def client(number: int) -> None:
        order = random.Random(number).choices(range(len(sentences)), k=each)
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.connect()
        start.wait()
        try:
            for text in order:
                begin = serving.now()
                body = post(connection, sentences[text])
                found[number].append((serving.now() - begin, text, body))
        except (OSError, http.client.HTTPException, children.ChildFailed) as error:
            failed.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    spent = processor_time(server)
    start.wait()
    begin = serving.now()
    for thread in threads:
        thread.join()
    seconds = serving.now() - begin
    spent = processor_time(server) - spent
    if failed:
        raise children.ChildFailed(f"{server.name}: {len(failed)} clients failed, first {failed[0]}")
    return Round(seconds=seconds, processor=spent, answers=tuple([answer for part in found for answer in part]))


def largest_difference(made: Round, expected: Sequence[Sequence[float]]) -> float:
    """Of an element of an answer from eager PyTorch's for that text alone."""
    worst = 0.0
    for _, text, body in made.answers:
        values = json.loads(body)["embedding"]
        worst = max(worst, *[abs(a - b) for a, b in zip(values, expected[text], strict=True)])
    return worst


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Requests a second of every round; latencies of all rounds together, in seconds."""
    latencies = sorted(latency for made in rounds for latency, _, _ in made.answers)
    return {
        "throughput": [len(made.answers) / made.seconds for made in rounds],
        "processor": sum([made.processor for made in rounds]) / len(latencies),
        "mean": statistics.mean(latencies),
        "p50": statistics.median(latencies),
        "p99": latencies[min(len(latencies) - 1, round(0.99 * len(latencies)))],
        "requests": len(latencies),
    }


def spell(name: str, clients: int, made: Round) -> str:
    """A round in a line, while the others go on."""
    found = summary([made])
    spent = f"{found['processor'] * 1e3:.2f} ms of the processors' time each"
    return f"{name}, {clients} clients: {found['throughput'][0]:.0f} requests/s, p99 {found['p99'] * 1e3:.1f} ms, {spent}"


def processor_time(server: Server) -> float:
    """Seconds that all threads of the process have had a processor."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(server: Server) -> int:
    """KiB of memory that the process holds."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Everything, as numbers.  Raises ChildFailed."""
    folder = given.cache / "serve"  # beside the bundle of the other benchmarks, which has other sizes
    folder.mkdir(parents=True, exist_ok=True)
    path = given.bundle or cases.bundle(CASE, folder)
    sentences = texts()
    expected = references(sentences)
    here = Path(__file__).parent
    served = [str(children.ROOT / "examples" / "serve.py"), str(path), "--port", "0", "--calls", str(given.calls)]
    batch, length = [dimension.sizes for dimension in read_manifest(str(path)).dimensions]
    lengths = given.lengths or ",".join(map(str, length))
    torch = [str(here / "serve_eager.py"), str(batch[-1]), lengths, given.device, str(given.calls)]
    commands = {"bundle": served, **{how: [*torch, how] for how in ("eager", *(["compile"] if given.compile else []))}}
    counts = (given.clients, 1)
    found: dict[str, Any] = {name: getattr(given, name) for name in ("clients", "threads", "calls")}
    found["processors"] = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        servers = [stack.enter_context(running(name, command, sentences[0], given.threads)) for name, command in commands.items()]
        rounds: dict[tuple[str, int], list[Round]] = {(server.name, count): [] for server in servers for count in counts}
        for server in servers:
            drive(server, sentences, given.clients, 2)  # not measured
        before = {server.name: health(server) for server in servers}
        for count in counts:
            each = given.requests if count > 1 else given.requests * 4
            for _ in range(given.rounds):
                for server in servers:
                    rounds[server.name, count].append(made := drive(server, sentences, count, each))
                    print(spell(server.name, count, made), file=sys.stderr, flush=True)
            if count > 1:
                after = {server.name: health(server) for server in servers}
        for server in servers:
            worst = max(largest_difference(made, expected) for count in counts for made in rounds[server.name, count])
            if worst > given.tolerance:
                raise children.ChildFailed(f"{server.name}: an answer is {worst:.1e} off, allowed are {given.tolerance:.0e}")
            calls, rows, waited, computing = (
                after[server.name][what] - before[server.name][what] for what in ("calls", "rows", "waited", "computing")
            )
            many = summary(rounds[server.name, given.clients])
            found[server.name] = {
                "torch": after[server.name]["torch"], "start": server.start, "resident": resident(server), "difference": worst,
                "rows per call": rows / calls, "waited": waited / rows, "call": computing / calls,
                "busy": computing / sum(made.seconds for made in rounds[server.name, given.clients]),
                "rest": many["mean"] - waited / rows - computing / calls,
                "many": many, "one": summary(rounds[server.name, 1]),
            }  # fmt: skip
    return found


def show(found: dict[str, Any]) -> None:
    """The table."""
    ways = [found[name] for name in ("bundle", "eager", "compile") if name in found]
    bundle, eager, *_ = ways

    def ratio(a: float, b: float) -> str:
        return f"{a / b:.2f} x"

    def row(name: str, key: str, spell: Callable[[Any], str]) -> tuple[str, ...]:
        return (name, *(spell(way[key]) for way in ways), ratio(eager[key], bundle[key]))

    rows: list[tuple[str, ...]] = [
        ("torch imported", *("yes" if way["torch"] else "no" for way in ways), ""),
        row("process start to first answer", "start", lambda seconds: f"{seconds:.2f} s"),
        row("memory of the process", "resident", report.mebibytes),
    ]
    for key, name in (("many", f"{found['clients']} clients"), ("one", "1 client")):
        own = [way[key] for way in ways]
        through = [statistics.median(way["throughput"]) for way in own]
        spread = [f"{min(way['throughput']):.0f}-{max(way['throughput']):.0f}" for way in own]
        cells = [f"{x:.0f} ({s})" for x, s in zip(through, spread, strict=True)]
        rows.append((f"{name}, requests a second", *cells, ratio(through[0], through[1])))
        for part, title in (("p50", "latency p50"), ("p99", "latency p99"), ("processor", "processor time a request")):
            cells = [f"{way[part] * 1e3:.1f} ms" for way in own]
            rows.append((f"{name}, {title}", *cells, ratio(own[1][part], own[0][part])))
    many = f"{found['clients']} clients"
    rows.append(row(f"{many}, a request's time in the queue", "waited", lambda seconds: f"{seconds * 1e3:.1f} ms"))
    rows.append(row(f"{many}, a call of the model", "call", lambda seconds: f"{seconds * 1e3:.1f} ms"))
    rows.append(row(f"{many}, the rest: HTTP, tokens, JSON", "rest", lambda seconds: f"{seconds * 1e3:.1f} ms"))
    rows.append((f"{many}, the model's share of the time", *(f"{way['busy']:.0%}" for way in ways), ""))
    rows.append((f"{many}, rows of a call", *(f"{way['rows per call']:.1f}" for way in ways), ""))
    total = sum(way[key]["requests"] for way in ways for key in ("many", "one"))
    note = f"all {total} answers correct; largest difference of an element {max(way['difference'] for way in ways):.1e}"
    at_once = f"{found['calls']} calls at once, {found['threads']} threads each"
    title = f"examples/serve.py, MiniLM, {found['processors']} processors, {at_once}"
    names = ("bundle", "eager PyTorch", "torch.compile")[: len(ways)]
    report.table(report.console(), title, ("", *names, "better than eager by"), rows, note)


def main() -> int:
    """0 when every answer was correct and torch stayed out of the bundle's server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where the bundle is kept")
    parser.add_argument("--bundle", type=Path, help="serve this one instead of building it")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=16, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--lengths", help="that PyTorch's requests are grouped by (default: those of the bundle): fewer, larger calls may suit it"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the model in either server: HTTP and the clients need some, too")
    parser.add_argument("--calls", type=int, default=1, help="of the model at once, in either server")
    parser.add_argument("--device", default="cpu", help="where PyTorch computes (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of an element (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the numbers instead of the table")
    given = parser.parse_args()
    try:
        found = measure(given)
    except children.ChildFailed as error:
        print(f"serve_http: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    return int(found["bundle"]["torch"])


if __name__ == "__main__":
    sys.exit(main())
