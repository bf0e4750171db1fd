"""Whether a program that was exported with dynamic dimensions is right at every declared size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.export import ExportedProgram

from cgbundle.format.schema import Size
from cgbundle.format.size_expressions import evaluate

from ..errors import ModelError
from ..model.flat_module import FlatModule, ProgramModule, Reference, run_eager
from ..model.source import SEED, Source, all_keys, sample
from ..util.tolerance import compare
from .programs import Programs, coarsest
from .signature import symbols_of


def check_dynamic(
    source: Source,
    flat: FlatModule,
    program: ExportedProgram,
    shapes: Sequence[tuple[Size, ...]],
    sizes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises size-excluded for a declared size that does not satisfy what export found.

    Export takes a dynamic size for larger than 1: `if x.shape[0] == 1` is False in its program.  So at int_keys where a size is 1
    the program is compared with the model, both run in eager PyTorch.
    """
    symbols_of(source, program, shapes, sizes)
    keys = all_keys(sizes)
    bound = coarsest(Programs(by_key=dict.fromkeys(keys, program), dynamic=True))
    for key in keys:
        chosen = dict(zip(sizes, key, strict=True))
        if not any(evaluate(size, chosen) == 1 for shape in shapes for size in shape if not isinstance(size, int)):
            continue
        tensors = sample(source, chosen).tensors
        wanted, made = [_seeded(reference, tensors) for reference in (flat, ProgramModule([program]))]
        for want, got in zip(wanted, made, strict=True):
            if compare(want, got).error > bound:
                at = ", ".join(f"{name}={size}" for name, size in chosen.items())
                raise ModelError("size-excluded", f"{source.label}: at {at} the model computes something else than at larger sizes")


def _seeded(reference: Reference, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs, with the same random numbers every time."""
    with torch.random.fork_rng(devices=sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})):
        torch.manual_seed(SEED)
        return run_eager(reference, tensors).outputs
