"""A model whose later part depends on a branch, as the paths 1-2-4 and 1-3-4 of torch.compile's trees of CUDA graphs, in one run:

    paths.py [--target cuda] [--record capture] [--layers 4] [--width 768] [--rows 8]

- a bundle of the model with `torch.cond`: one graph, one launch, and the GPU chooses;
- `torch.compile(mode="reduce-overhead")` of the model with `if`: a graph per part, and the host waits for the condition;
- `torch.compile(mode="reduce-overhead")` of the model with `torch.cond`.

A row is microseconds per call where nobody waits between calls, per call that is waited for, and seconds until the first result of
the second path.  Exit status 1 when results differ.
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

ROUNDS, CALLS = 9, 100


def stack(layers: int, width: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)])


class Cond(nn.Module):
    """1, then 2 or 3, then 4."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = [stack(layers, width) for _ in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        return self.four(torch.cond(x.sum() > 0, lambda h: self.two(h), lambda h: self.three(h).tanh(), (h,)))


class If(Cond):
    """The same with a branch of Python's."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        return self.four(self.two(h) if x.sum() > 0 else self.three(h).tanh())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--record", default="capture")
    for name, value in (("layers", 4), ("width", 768), ("rows", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if given.target == "cuda" else ("cpu", torch.float32)
    models = []
    for kind in (Cond, If):
        torch.manual_seed(0)
        models.append(kind(given.layers, given.width).to(dtype).eval())
    inputs = [(torch.randn(given.rows, given.width) + shift).to(device, dtype) for shift in (-1, 1)]
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        options = {"record": given.record} if device == "cuda" else {}
        example = inputs[0].cpu()
        path = cgcompile.build(models[0], lambda: (example,), out=Path(scratch, "tree.cgb"), target=given.target, **options).path
        begun = time.perf_counter()
        program = cgbundle.load(path, outputs="view")
        cond, python = [model.to(device) for model in models]
        wanted = [cond(x) for x in inputs]
        right = row("bundle, one launch", program, inputs, wanted, begun)
        for name, model in (("torch.compile, Python's if", python), ("torch.compile, torch.cond", cond)):
            begun = time.perf_counter()
            compiled = torch.compile(model, mode="reduce-overhead")
            try:
                right &= row(name, compiled, inputs, wanted, begun)
            except RuntimeError as error:  # torch could not compile it; the others are still compared
                print(f"{name:30} {type(error).__name__}: {str(error).splitlines()[0][:90]}")
    return 0 if right else 1


def row(name: str, call: Callable[[Tensor], Any], inputs: Sequence[Tensor], wanted: Sequence[Tensor], begun: float) -> bool:
    """Prints a row; whether the results are right."""
    found = [torch.as_tensor(call(x)).clone() for x in inputs]
    wait()
    first = time.perf_counter() - begun
    for _ in range(10):
        for x in inputs:
            call(x)
    together = [timed(call, inputs, each=False) for _ in range(ROUNDS)]
    waited = [timed(call, inputs, each=True) for _ in range(ROUNDS)]
    right = all(torch.allclose(got.float(), want.float(), rtol=0.05, atol=0.05) for got, want in zip(found, wanted, strict=True))
    times = f"{statistics.median(together):8.1f} us {statistics.median(waited):8.1f} us waited for {first:8.2f} s"
    print(f"{name:30} {times}{'' if right else '  OTHER RESULTS'}", flush=True)
    return right


def timed(call: Callable[[Tensor], Any], inputs: Sequence[Tensor], *, each: bool) -> float:
    """Microseconds per call, the paths by turns; `each`: the host waits for every call."""
    wait()
    begun = time.perf_counter()
    for number in range(CALLS):
        call(inputs[number % 2])
        if each:
            wait()
    wait()
    return (time.perf_counter() - begun) / CALLS * 1e6


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
