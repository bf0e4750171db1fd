"""Child process: `replays.py MODEL BUNDLE COUNT` replays random sizes on changing streams and compares every output with that of
the input's first replay.

Then it compares mode="stream" with mode="graph" bit for bit. It compares sizes that are padded or chunked with eager PyTorch.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from tests.bench.gpu import gpu_calls

INPUTS = 12
"""Different inputs of every size."""

OTHERS = (2, 3, 7, 9, 31, 33, 40, 70)
"""Batch sizes that are padded, or chunked and padded."""


def main(model: str, bundle: str, count: str) -> None:
    torch.manual_seed(5)
    network = gpu_calls.network_of(model, bundle)
    pool = {key: drawn(value) for key, value in gpu_calls.self_test_calls(bundle).items()}
    with torch.no_grad(), gpu_calls.loaded(bundle) as program:
        first = {key: [program(value) for value in values] for key, values in pool.items()}
        numbers: dict[str, Any] = {
            "replays": int(count),
            "wrong": replays(program, pool, first, int(count)),
            "different outputs": sum(not torch.equal(values[0], values[1]) for values in first.values()),
            "difference to eager": {
                str(key[0]): max(gpu_calls.relative(network(x), y) for x, y in zip(values, first[key], strict=True))
                for key, values in pool.items()
            },
        }
        with gpu_calls.loaded(bundle, mode="stream") as stream:
            pairs = [(stream(x), y) for key, values in pool.items() for x, y in zip(values, first[key], strict=True)]
            numbers["stream compared"] = len(pairs)
            numbers["stream differs"] = sum(not torch.equal(x, y) for x, y in pairs)
        with gpu_calls.loaded(bundle, on_miss="chunk") as chunk:
            rows = torch.cat([value for values in pool.values() for value in values])
            numbers["pad"] = {size: gpu_calls.relative(network(rows[:size]), program(rows[:size])) for size in OTHERS}
            numbers["chunk"] = {size: gpu_calls.relative(network(rows[:size]), chunk(rows[:size])) for size in OTHERS}
    print(json.dumps(numbers))


def drawn(value: torch.Tensor) -> list[torch.Tensor]:
    """Returns INPUTS random inputs, whose elements are drawn from those of `value`."""
    flat = value.flatten()
    return [flat[torch.randint(0, flat.numel(), value.shape, device=value.device)] for _ in range(INPUTS)]


def replays(program: Any, pool: dict[Any, list[Any]], first: dict[Any, list[Any]], count: int) -> int:
    """Returns how many of `count` replays, with random sizes and inputs, differ from the first replay of the same input."""
    draw = random.Random(7)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    keys = list(pool)
    torch.cuda.synchronize()
    for _ in range(count):
        key, index, lane = draw.choice(keys), draw.randrange(INPUTS), draw.randrange(len(streams))
        with torch.cuda.stream(streams[lane]):
            output = program(pool[key][index])
            wrong[lane] += (output != first[key][index]).any()
    torch.cuda.synchronize()
    return int(sum(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
