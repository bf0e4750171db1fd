"""Compares the training step of examples/train.py in a bundle with eager PyTorch and torch.compile.

    training.py [--target cuda] [--steps 200] [--saved 100]

All variants train on the same batches from the same weights.  A row shows steps per second and the largest relative difference of a
loss from eager PyTorch.  After SAVED steps the bundle's state is saved as safetensors; a second program loads it and continues.
Exit status 1 if a loss differs by more than 1e-3, or if the second program's losses are not bit-identical.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import cgbundle
import cgcompile
from examples import train

Batch = tuple[Tensor, Tensor]
ALLOWED = 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--saved", type=int, default=100)
    options = parser.parse_args()
    device = "cuda" if options.target == "cuda" else "cpu"
    batches = [tuple([ids.to(device) for ids in drawn(number)]) for number in range(options.steps)]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "train.cgb")
        cgcompile.build(train.model(), train.entries(), sizes={"evaluate": {"batch": [32]}}, out=path, target=options.target)
        with torch.no_grad():
            eager = train.model().to(device)
            expected, rate = losses(eager.step, batches)
            row("eager", rate, expected, expected)
            compiled = train.model().to(device)
            actual, rate = losses(torch.compile(compiled.step, mode="reduce-overhead"), batches)
            row("torch.compile", rate, actual, expected)
        with cgbundle.load(path) as program:
            actual, rate = losses(program.step, batches)
            worst = row("bundle", rate, actual, expected)
        again, rate = resumed(path, Path(scratch, "state.safetensors"), batches, options.saved)
        worst = max(worst, row("resumed", rate, again, actual[options.saved :]))
    same = again == actual[options.saved :]
    print("resumed: the same losses" if same else "resumed: other losses")
    return 0 if worst <= ALLOWED and same else 1


def drawn(number: int) -> Batch:
    torch.manual_seed(number + 1)
    return train.sequences(train.BATCH)


def losses(step: Callable[..., Tensor], batches: Sequence[Batch]) -> tuple[list[float], float]:
    """Returns the loss of every step, and the steps per second of the second half, without a wait between steps."""
    losses_so_far, half = [], len(batches) // 2
    begun = 0.0
    for index, batch in enumerate(batches):
        if index == half:
            wait()
            begun = time.perf_counter()
        losses_so_far.append(step(*batch).clone())
    wait()
    return [float(loss) for loss in losses_so_far], (len(batches) - half) / (time.perf_counter() - begun)


def resumed(path: Path, file: Path, batches: Sequence[Batch], saved: int) -> tuple[list[float], float]:
    """Returns the losses from step `saved` on, of a program that loads another program's state, and its steps per second."""
    with cgbundle.load(path) as program:
        losses(program.step, batches[:saved])
        save_file({name: torch.from_dlpack(program.state[name]).cpu().clone() for name in program.state}, file)
    with cgbundle.load(path) as program:
        for name, value in load_file(file).items():
            program.state[name] = value
        return losses(program.step, batches[saved:])


def row(name: str, rate: float, actual: Sequence[float], expected: Sequence[float]) -> float:
    """Prints a row and returns the largest relative difference."""
    worst = max(abs(one - other) / abs(other) for one, other in zip(actual, expected, strict=True))
    print(f"{name:14} {rate:9.1f} steps/s   loss {actual[0]:.4f} to {actual[-1]:.4f}   off by {worst:.1e} at most", flush=True)
    return worst


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
