"""Measures a language model's bundle as `cgcompile serve` runs it: prompts, steps, time between steps, shared prefixes, load over
HTTP.

    python -m tests.bench.gpu.served_language_model BUNDLE TOKENIZER [--skip PART,PART] [--seconds 120] [--words requests=256,...]

The parts, each one or more lines of JSON, printed at once:

    load      seconds and bytes, with the number of int_keys
    prefill   milliseconds of single prompts of 128, 512, 2,048 and 4,000 tokens
    decode    tokens a second of the engine at every recorded number of lanes, and microseconds between two calls
    shared    64 requests with 1,500 common tokens, with and without shared pages, and whether the tokens are equal
    equal     64 prompts one by one and together: the number of equal texts, and the best token's margin at the first difference
    http      a load of mixed requests from another process: `cgcompile bench URL --generate --load WORDS`

A part that would start after `--seconds` is skipped with a message.  Needs no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import cgbundle
from cgcompile.tools.generation.load import TOKENS as VOCABULARY
from cgserve.language.bundle_model import BundleModel, sizes_of
from cgserve.language.engine import Engine
from cgserve.scheduling.requests import Request, Sampling, Step, Token

GREEDY = Sampling(temperature=0.0)
PROMPTS, CONTEXT, TOKENS = (128, 512, 2048, 4000), 128, 64
"""PROMPTS: lengths of single prompts in part `prefill`. CONTEXT and TOKENS: tokens of each prompt and of its answer in part
`decode`."""

COMMON, TOGETHER = 1500, 64


class Timed:
    """An entry that records when each of its calls began and ended."""

    def __init__(self, entry: Any, times: list[tuple[str, float, float]]) -> None:
        self._entry, self._times = entry, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __call__(self, *inputs: Any) -> Any:
        began = time.perf_counter()
        outputs = self._entry(*inputs)
        self._times.append((self._entry.name, began, time.perf_counter()))
        return outputs


@dataclass(frozen=True)
class Served:
    """A loaded bundle: the program, its `BundleModel`, the recorded numbers of lanes, and the times of the calls so far."""

    program: cgbundle.Program
    model: BundleModel
    lanes: tuple[int, ...]
    times: list[tuple[str, float, float]]

    def texts(self, requests: Sequence[Request], *, shared: bool = True, lanes: int | None = None) -> Run:
        """Returns the tokens of requests that start together."""
        limits = self.model.limits
        self.model.limits = replace(limits, shared=shared and limits.shared, lanes=min(lanes or limits.lanes, limits.lanes))
        self.times.clear()
        try:
            return asyncio.run(answered(self.model, requests))
        finally:
            self.model.limits = limits


@dataclass(frozen=True)
class Run:
    """The tokens of every request, the seconds to its first token and to its end, and the steps of the model."""

    tokens: list[list[Token]]
    firsts: list[float]
    ends: list[float]
    steps: list[tuple[Step, float]]


async def answered(model: BundleModel, requests: Sequence[Request]) -> Run:
    tokens, firsts, ends = [list[Token]() for _ in requests], [0.0] * len(requests), [0.0] * len(requests)
    steps: list[tuple[Step, float]] = []
    async with Engine(model, len(requests), lambda step, seconds: steps.append((step, seconds))) as engine:
        began = time.perf_counter()
        async with engine.open(requests) as stream:
            async for index, progress in stream:
                now = time.perf_counter() - began
                firsts[index] = firsts[index] or now
                ends[index] = now
                tokens[index] += progress.tokens
    return Run(tokens, firsts, ends, steps)


def prompt(number: int, count: int) -> tuple[int, ...]:
    """Returns `count` random tokens; the same ones for the same number."""
    return tuple(random.Random(number).choices(VOCABULARY, k=count))


def load(bundle: str) -> Served:
    began = time.perf_counter()
    program = cgbundle.load(bundle)
    seconds = time.perf_counter() - began
    times: list[tuple[str, float, float]] = []
    entries = {name: Timed(entry, times) for name, entry in program.entries.items()}
    loaded: Any = SimpleNamespace(entries=entries, manifest=program.manifest)
    decodes = program.entries["decode"]
    lanes = tuple(sorted({sizes_of(decodes, key)["batch"] for key in decodes.int_keys}))
    served = Served(program, BundleModel(loaded, 1), lanes, times)
    began = time.perf_counter()
    served.texts([Request(prompt=prompt(0, 9), most=2, sampling=GREEDY)])
    keys = sum(len(entry.int_keys) for entry in program.entries.values())
    limits = served.model.limits
    say(
        "load", seconds=seconds, first_two_tokens=time.perf_counter() - began, int_keys=keys, memory=dict(program.memory),
        pages=limits.pages, lanes=limits.lanes, readers=limits.readers, chunk=limits.chunk,
    )  # fmt: skip
    return served


def prefill(served: Served, _: argparse.Namespace) -> None:
    for count in PROMPTS:
        if count + 1 > served.model.limits.context:
            continue
        runs = []
        for turn in range(4):
            run = served.texts([Request(prompt=prompt(100 * turn + count, count), most=1, sampling=GREEDY)], shared=False)
            runs.append((run.firsts[0], sum(end - began for _, began, end in served.times), len(run.steps)))
        first, calls, steps = min(runs[1:])
        say("prefill", tokens=count, milliseconds=first * 1e3, in_calls=calls * 1e3, calls=steps, tokens_per_second=count / first)


def decode(served: Served, _: argparse.Namespace) -> None:
    for count in served.lanes:
        requests = [Request(prompt=prompt(number, CONTEXT), most=TOKENS, sampling=GREEDY) for number in range(count)]
        served.texts(requests, lanes=count)
        spans = [(began, end) for name, began, end in served.times if name == "decode"][-TOKENS + 8 : -2]
        gaps = sorted(later - end for (_, end), (later, _) in itertools.pairwise(spans))
        calls = statistics.median(end - began for began, end in spans)
        period = (spans[-1][0] - spans[0][0]) / (len(spans) - 1)
        say(
            "decode", lanes=count, tokens_per_second=count / period, step_ms=period * 1e3, call_ms=calls * 1e3,
            between_us=statistics.median(gaps) * 1e6, between_p99_us=gaps[len(gaps) * 99 // 100] * 1e6,
        )  # fmt: skip


def shared(served: Served, _: argparse.Namespace) -> None:
    common = min(COMMON, served.model.limits.context // 2)
    beginning = prompt(-1, common)
    requests = [
        Request(prompt=(*beginning, *prompt(number, 20 + number)), most=16, sampling=GREEDY)
        for number in range(min(TOGETHER, served.model.limits.lanes))
    ]
    rows = {}
    for name in ("warm", "own", "shared"):
        run = rows[name] = served.texts(requests, shared=name == "shared")
        read = sum(len(lane.ids) for step, _ in run.steps if step.entry == "prefill" for lane in step.lanes)
        if name != "warm":
            say(
                "shared", pages=name, common=common, requests=len(requests), tokens_read=read, seconds=max(run.ends),
                first_p50=statistics.median(run.firsts), first_p99=sorted(run.firsts)[len(requests) * 99 // 100],
            )  # fmt: skip
    same = [one == two for one, two in zip(rows["own"].tokens, rows["shared"].tokens, strict=True)]
    ids = [[t.id for t in one] == [t.id for t in two] for one, two in zip(rows["own"].tokens, rows["shared"].tokens, strict=True)]
    say("shared", same_tokens=sum(ids), same_log_probabilities=sum(same), of=len(same))


def equal(served: Served, _: argparse.Namespace) -> None:
    sampling = Sampling(temperature=0.0, alternatives=2)
    order = random.Random(0)
    requests = [
        Request(prompt=prompt(number, order.randint(8, 200)), most=32, sampling=sampling)
        for number in range(min(TOGETHER, served.model.limits.lanes))
    ]
    alone = [served.texts([request], shared=False).tokens[0] for request in requests]
    together = served.texts(requests, shared=False).tokens
    parted = []
    for index, (one, two) in enumerate(zip(alone, together, strict=True)):
        place = next((at for at, (left, right) in enumerate(zip(one, two, strict=False)) if left.id != right.id), None)
        if place is not None:
            best, second = [logprob for _, logprob in one[place].alternatives]
            parted.append({"request": index, "token": place, "margin": round(best - second, 5)})
    say("equal", same=len(requests) - len(parted), of=len(requests), parted=parted)


def http(served: Served, options: argparse.Namespace) -> None:
    served.program.close()
    with server(options.bundle, options.tokenizer) as address:
        command = [sys.executable, "-m", "cgcompile_cli", "bench", address, "--generate", "--quiet", "--json"]
        for words in ("requests=8,prompt=64,answer=8", options.words):
            run = subprocess.run([*command, "--load", words], capture_output=True, text=True, check=False)
        numbers = json.loads(run.stdout) if run.stdout else {"failed": run.stderr}
        say("http", words=options.words, **numbers)


@contextmanager
def server(bundle: str, tokenizer: str) -> Iterator[str]:
    command = [sys.executable, "-m", "cgcompile_cli", "serve", bundle, "--tokenizer", tokenizer, "--port", "0", "--turns", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line, serving = process.stderr.readline(), process.stderr.readline()
        if not serving.startswith("serving "):
            raise SystemExit(line + serving + process.stderr.read())
        yield line.split()[-1]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


PARTS: dict[str, Callable[[Served, argparse.Namespace], None]] = {
    "prefill": prefill, "decode": decode, "shared": shared, "equal": equal, "http": http,
}  # fmt: skip


def say(part: str, **numbers: Any) -> None:
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in numbers.items()}
    print(json.dumps({"part": part, **rounded}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("tokenizer", help="a folder with tokenizer.json")
    parser.add_argument("--skip", default="", help="parts, with commas between them")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--words", default="requests=256,prompt=32-2000,answer=16-512", help="the load")
    options = parser.parse_args()
    began = time.perf_counter()
    sys.setswitchinterval(1e-4)
    served = load(options.bundle)
    for name, part in PARTS.items():
        if name in options.skip.split(","):
            continue
        if time.perf_counter() - began > options.seconds:
            say(name, left_out=f"{options.seconds:g} s are over")
            continue
        part(served, options)


if __name__ == "__main__":
    main()
