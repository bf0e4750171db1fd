"""How exact eager PyTorch itself is on a GPU: kernels that add in any order, and float32 operands that it rounds to TF32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..model.flat_module import Reference, run_eager
from ..util.tolerance import compare


def eager_spread(reference: Reference, tensors: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """By output, the largest error between runs on the same inputs: a first, a second, and one without TF32.  0.0 on the CPU."""
    first = run_eager(reference, tensors).outputs
    if not any(output.is_cuda for output in first):
        return tuple([0.0] * len(first))
    second = run_eager(reference, tensors).outputs
    with _without_tf32():
        exact = run_eager(reference, tensors).outputs
    return tuple([max(compare(a, b).error, compare(a, c).error) for a, b, c in zip(first, second, exact, strict=True)])


@contextmanager
def _without_tf32() -> Iterator[None]:
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = False
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value
