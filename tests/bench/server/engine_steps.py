"""Measures the engine of `cgcompile serve` between two calls of a model that computes nothing.

    python -m tests.bench.server.engine_steps [LANES...] [--milliseconds 2] [--prompt 500] [--tokens 400]

For every number of lanes, that many requests generate tokens together, in an engine over a program whose calls sleep, like a
thread that waits for a GPU.  Prints as JSON: microseconds from the end of a call to the start of the next (median and 99th
percentile), and CPU seconds per call.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from types import SimpleNamespace
from typing import Any

from cgbundle.tensors.tensor import empty
from cgserve.language.bundle_model import BundleModel
from cgserve.language.engine import Engine
from cgserve.scheduling.requests import Request, Sampling

PAGE, CHUNK, CONTEXT = 16, 512, 8192
OUTPUTS = {"token": ("int64", ()), "logprob": ("float32", ()), "top_token": ("int64", (20,)), "top_logprob": ("float32", (20,))}


class Calls:
    """An entry whose calls sleep; it records when each began and ended."""

    def __init__(self, lanes: int, seq: int | None, seconds: float) -> None:
        sizes = {"batch": lanes} | ({"seq": seq} if seq else {}) | {"blocks": CONTEXT // PAGE}
        self.int_keys = (tuple(sizes.values()),)
        self.spec = SimpleNamespace(dimensions=[SimpleNamespace(name=name) for name in sizes])
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.times: list[tuple[float, float]] = []
        self._seconds = seconds
        self._answer = {name: empty(dtype, (lanes, *shape)) for name, (dtype, shape) in OUTPUTS.items()}

    def __call__(self, *_: Any) -> dict[str, Any]:
        began = time.perf_counter()
        time.sleep(self._seconds)
        self.times.append((began, time.perf_counter()))
        return self._answer


def program(lanes: int, seconds: float) -> tuple[Any, Calls]:
    """Returns a program for BundleModel, and its decode entry."""
    decode = Calls(lanes, None, seconds)
    rows = {"keys_0": (lanes * CONTEXT // PAGE + 1, 1, PAGE, 1), "seen": (lanes + 1, 1000)}
    weights = [SimpleNamespace(name=name, shape=shape) for name, shape in rows.items()]
    entries = {"prefill": Calls(1, CHUNK, seconds), "decode": decode}
    return SimpleNamespace(entries=entries, manifest=SimpleNamespace(weights=weights)), decode


async def measure(lanes: int, options: argparse.Namespace) -> dict[str, float]:
    loaded, decode = program(lanes, options.milliseconds / 1e3)
    requests = [
        Request(prompt=tuple(range(number, number + options.prompt)), most=options.tokens, sampling=Sampling(temperature=0.0))
        for number in range(lanes)
    ]
    async with Engine(BundleModel(loaded, 1), lanes, lambda *_: None) as engine, engine.open(requests) as stream:
        began = None
        async for _, _ in stream:
            if began is None and len(decode.times) > 1:
                began = time.process_time(), len(decode.times)
    assert began is not None
    processor = (time.process_time() - began[0]) / (len(decode.times) - began[1])
    steps = decode.times[lanes + 5 :]  # all prompts have been read by then
    gaps = sorted(second[0] - first[1] for first, second in itertools.pairwise(steps))
    return {
        "lanes": lanes, "gap_us": statistics.median(gaps) * 1e6, "gap_p99_us": gaps[len(gaps) * 99 // 100] * 1e6,
        "processor_us": processor * 1e6,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lanes", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--milliseconds", type=float, default=2.0, help="of a call")
    parser.add_argument("--prompt", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    for lanes in options.lanes:
        numbers = asyncio.run(measure(lanes, options))
        print(json.dumps({name: round(value, 1) for name, value in numbers.items()}), flush=True)


if __name__ == "__main__":
    main()
