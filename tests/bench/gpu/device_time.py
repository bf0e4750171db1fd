"""Child process: `device_time.py MODEL BUNDLE` times the GPU work of a call for every size, beside torch.compile with the same
lowering.

CUDA events surround many replays. Rounds of the two alternate, so that both run at the same clock frequency.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch

from cgbundle.gpu.backend import CudaBackend
from tests.bench.gpu import gpu_calls

ROUNDS = 15
REPLAYS = 60


def microseconds(call: gpu_calls.Call) -> float:
    """Returns microseconds per call, over one round."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    start.record()
    for _ in range(REPLAYS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / REPLAYS


def main(model: str, bundle: str) -> None:
    """Prints, for each size, the median microseconds of every variant and the differences of the outputs, as JSON."""
    calls = gpu_calls.self_test_calls(bundle)
    network = gpu_calls.network_of(model, bundle)
    backend = gpu_calls.bare(bundle)
    program = gpu_calls.loaded(bundle, outputs="view")
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        default, fast = gpu_calls.compiled(network, False), gpu_calls.compiled(network, True)
        for key, value in calls.items():
            rows.append(one(key, value, network, backend, program, default, fast))
    print(json.dumps({"rows": rows, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))


def one(
    key: tuple[int, ...], value: torch.Tensor, network: Any, backend: CudaBackend, program: Any, default: Any, fast: Any
) -> dict[str, Any]:
    """Returns the row of one size."""
    number = program.int_keys.index(key)
    inductor, eager = gpu_calls.capture(default, value), gpu_calls.capture(network, value)
    for _ in range(5):
        fast(value)
    stream = torch.cuda.current_stream().cuda_stream
    variants: dict[str, gpu_calls.Call] = {
        "bundle, graph": gpu_calls.bare_launch(backend, number, value, stream),
        "torch.compile, graph": gpu_calls.launch(inductor),
        "eager kernels, graph": gpu_calls.launch(eager),
        "bundle, whole call": lambda: program(value),
        "torch.compile reduce-overhead, whole call": lambda: fast(value),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, variant in variants.items():
            times[name].append(microseconds(variant))
    actual = program(value).tensor.clone()
    compiled, expected = default(value), network(value)
    return {
        "key": list(key),
        "microseconds": {name: statistics.median(values) for name, values in times.items()},
        "spread": {name: [min(values), max(values)] for name, values in times.items()},
        "same bits as torch.compile": bool(torch.equal(actual, compiled)),
        "difference to torch.compile": gpu_calls.relative(compiled, actual),
        "difference to eager": gpu_calls.relative(expected, actual),
        "torch.compile to eager": gpu_calls.relative(expected, compiled),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
