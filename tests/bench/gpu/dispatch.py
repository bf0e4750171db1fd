"""Child process: `dispatch.py MODEL BUNDLE` times the CPU work of one call at the smallest size; all variants alternate in one run.

Each call of a burst is timed while the GPU still works on the first one. The wait for the GPU is not timed, so a launch never
waits.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

from tests.bench.gpu import gpu_calls

ROUNDS = 60
BURST = 12


def main(model: str, bundle: str) -> None:
    """Prints microseconds per call, quartiles of every variant, as JSON."""
    calls = gpu_calls.self_test_calls(bundle)
    key = min(calls)
    value = calls[key]
    network = gpu_calls.network_of(model, bundle)
    copy, view = gpu_calls.loaded(bundle), gpu_calls.loaded(bundle, outputs="view")
    backend = gpu_calls.bare(bundle)
    number = copy.int_keys.index(key)
    with torch.no_grad():
        eager = gpu_calls.capture(network, value)
        default = gpu_calls.capture(gpu_calls.compiled(network, False), value)
        fast = gpu_calls.compiled(network, True)
        for _ in range(5):
            fast(value)
        stream = torch.cuda.current_stream().cuda_stream
        variants: dict[str, gpu_calls.Call] = {
            "bundle, view": lambda: view(value),
            "bundle, copy": lambda: copy(value),
            "bundle, launch only": gpu_calls.bare_launch(backend, number, value, stream),
            "torch.compile reduce-overhead": lambda: fast(value),
            "torch graph by hand and copy": gpu_calls.replay(default, value),
            "torch graph by hand and copy, eager kernels": gpu_calls.replay(eager, value),
            "cuGraphLaunch, inductor": gpu_calls.launch(default),
            "cuGraphLaunch, eager kernels": gpu_calls.launch(eager),
        }
        nanoseconds = measure(variants)
        expected = network(value)
        differences = {
            name: gpu_calls.relative(expected, output.tensor if hasattr(output, "tensor") else output)
            for name in ("bundle, view", "bundle, copy", "torch.compile reduce-overhead", "torch graph by hand and copy")
            if (output := variants[name]()) is not None
        }
    quartiles = {name: [cut / 1000 for cut in statistics.quantiles(times, n=4)] for name, times in nanoseconds.items()}
    print(json.dumps({"key": list(key), "quartiles": quartiles, "calls": ROUNDS * BURST, "differences": differences}))


def measure(variants: dict[str, gpu_calls.Call]) -> dict[str, list[int]]:
    """Returns the nanoseconds of every call of every variant, without freeing the result."""
    clock = time.perf_counter_ns
    nanoseconds: dict[str, list[int]] = {name: [] for name in variants}
    for round_ in range(ROUNDS + 3):
        for name, variant in variants.items():
            torch.cuda.synchronize()
            for _ in range(BURST):
                start = clock()
                result: Any = variant()
                duration = clock() - start
                del result
                if round_ >= 3:
                    nanoseconds[name].append(duration)
    torch.cuda.synchronize()
    return nanoseconds


if __name__ == "__main__":
    main(*sys.argv[1:])
