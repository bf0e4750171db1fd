"""Compares Python branches in one launch with torch.compile's CUDA graph trees.

    paths.py [--target cuda] [--record capture] [--layers 4] [--width 768] [--rows 64]

Two models: the first example in PyTorch's source of CUDA graph trees, verbatim, and linear layers with a branch (the paths 1-2-4
and 1-3-4). Each runs as:

- a bundle of the model with its `if`: one graph, one launch, and the GPU selects the path;
- `torch.compile(mode="reduce-overhead")` of the same model: a graph per part, and the host waits for the condition;
- for the second model also `torch.cond`.

A row shows microseconds per call: CPU time of the process, wall time without a wait between calls, and wall time with a wait after
every call.  It also shows seconds until the first result of the second path.  Exit status 1 if results differ.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cgbundle
import cgcompile
from tests.helpers.models.path_models import Foo

ROUNDS, CALLS = 9, 100


def stack(layers: int, width: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)])


class Cond(nn.Module):
    """Runs layers 1, then 2 or 3, then 4."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = [stack(layers, width) for _ in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        return self.four(torch.cond(x.sum() > 0, lambda h: self.two(h), lambda h: self.three(h).tanh(), (h,)))


class If(Cond):
    """Runs the same layers with a Python branch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        return self.four(self.two(h) if x.sum() > 0 else self.three(h).tanh())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--record", default="capture")
    for name, value in (("layers", 4), ("width", 768), ("rows", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if arguments.target == "cuda" else ("cpu", torch.float32)
    models = []
    for kind in (If, Cond):
        torch.manual_seed(0)
        models.append(kind(arguments.layers, arguments.width).to(dtype).eval())
    inputs = [(torch.randn(arguments.rows, arguments.width) + shift).to(device) for shift in (-1, 1)]
    options = {"record": arguments.record} if device == "cuda" else {}
    right = rows(Foo(), None, inputs, arguments.target, options)
    return 0 if right & rows(models[0], models[1], [x.to(dtype) for x in inputs], arguments.target, options) else 1


def rows(model: nn.Module, cond: nn.Module | None, inputs: Sequence[Tensor], target: str, options: dict[str, Any]) -> bool:
    """Prints the rows of a model, and of the same model with `torch.cond`. Returns whether all results are right."""
    example = inputs[0].cpu()
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        path = cgcompile.build(model, lambda: (example,), out=Path(scratch, "tree.cgb"), target=target, **options).path
        begun = time.perf_counter()
        program = cgbundle.load(path, outputs="view")
        model.to(inputs[0].device)
        wanted = None if isinstance(model, Foo) else [model(x) for x in inputs]
        print(type(model).__name__)
        right = row("  bundle, one launch", program, inputs, wanted, begun)
        for name, other in (("torch.compile, Python's if", model), ("torch.compile, torch.cond", cond)):
            if other is None:
                continue
            other.to(inputs[0].device)
            begun = time.perf_counter()
            compiled = torch.compile(other, mode="reduce-overhead")
            try:
                right &= row(f"  {name}", compiled, inputs, wanted, begun)
            except RuntimeError as error:  # torch could not compile it; the others are still compared
                print(f"  {name:30} {type(error).__name__}: {str(error).splitlines()[0][:90]}")
        program.close()
    return right


def row(name: str, call: Callable[[Tensor], Any], inputs: Sequence[Tensor], wanted: Sequence[Tensor] | None, begun: float) -> bool:
    """Prints a row. Returns whether the results are right; random results (`wanted` is None) always are."""
    results = [torch.as_tensor(call(x)).clone() for x in inputs]
    wait()
    first = time.perf_counter() - begun
    for _ in range(10):
        for x in inputs:
            call(x)
    together = [timed(call, inputs, wait_for_all=False) for _ in range(ROUNDS)]
    waited = [timed(call, inputs, wait_for_all=True) for _ in range(ROUNDS)]
    pairs = zip(results, wanted or results, strict=True)
    right = all(torch.allclose(got.float(), want.float(), rtol=0.05, atol=0.05, equal_nan=True) for got, want in pairs)
    cpu, wall, latency = [statistics.median(column) for column in (*zip(*together, strict=True), [time for _, time in waited])]
    times = f"{cpu:8.1f} us CPU {wall:8.1f} us {latency:8.1f} us waited for {first:8.2f} s"
    print(f"{name:30} {times}{'' if right else '  OTHER RESULTS'}", flush=True)
    return right


def timed(call: Callable[[Tensor], Any], inputs: Sequence[Tensor], *, wait_for_all: bool) -> tuple[float, float]:
    """Returns (CPU, wall) microseconds per call; the paths alternate. `wait_for_all` waits for the GPU after every call."""
    wait()
    begun, used = time.perf_counter(), time.process_time()
    for number in range(CALLS):
        call(inputs[number % 2])
        if wait_for_all:
            wait()
    busy = time.process_time() - used
    wait()
    return busy / CALLS * 1e6, (time.perf_counter() - begun) / CALLS * 1e6


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
