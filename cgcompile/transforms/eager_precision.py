"""How exact eager PyTorch itself is: inputs that are known up to their rounding, kernels that add in any order, float32 operands
that a GPU rounds to TF32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..model.devices.index_guard import FAILURES, guarded_indices
from ..model.flat_module import Reference, run_eager, without_tf32
from ..model.source import CPU
from ..util.tolerance import compare

WIDE = (torch.float64, torch.complex128)
"""A step of the inputs says nothing of arithmetic that is finer than they are."""


def eager_spread(reference: Reference, tensors: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """By output, the largest error of other runs of eager PyTorch beside a first: one whose float32 inputs are a rounding step
    off, and on a GPU a second one and one without TF32.  Where no input can be, as with tokens, the float32 parameters of one axis
    are: norms and biases, which every layer has.

    That step turns over what is rounded inside (activations quantized to int8: 3e-3 of the result measured), and shows a result
    that is a small difference of large numbers (the one logit of a SigLIP: 1e-4; SmolLM2 behind 2000 tokens that no call has
    read, as in the self-test of a cache: 5e-4).
    """
    first = run_eager(reference, tensors).outputs
    others = [_stepped(tensor) for tensor in tensors]
    same = all(torch.equal(other, tensor) for other, tensor in zip(others, tensors, strict=True))
    try:
        with guarded_indices(tensors[0].device if tensors else CPU), _parameters_stepped(reference if same else None):
            stepped = run_eager(reference, others).outputs  # a model may make positions of floats
    except FAILURES:
        stepped = first  # the model asserts what its inputs are
    reruns = []
    if any(output.is_cuda for output in first):
        reruns.append(run_eager(reference, tensors).outputs)
        with without_tf32():
            reruns.append(run_eager(reference, tensors).outputs)
    steps = [0.0 if want.dtype in WIDE else compare(want, other).error for want, other in zip(first, stepped, strict=True)]
    others = [[compare(want, other).error for other in repeats] for want, *repeats in zip(first, *reruns, strict=True)]
    return tuple([max([step, *other]) for step, other in zip(steps, others, strict=True)])


@contextmanager
def _parameters_stepped(reference: Reference | None) -> Iterator[None]:
    """Meanwhile every float32 parameter of one axis is a rounding step off; those of None are none."""
    parameters = reference.parameters() if isinstance(reference, torch.nn.Module) else ()
    plain = [value.detach() for value in parameters if type(value) is torch.nn.Parameter and value.layout is torch.strided]
    vectors = {value.data_ptr(): value for value in plain if value.dtype == torch.float32 and value.dim() == 1}  # tied ones once
    before = {address: value.clone() for address, value in vectors.items()}
    try:
        for value in vectors.values():
            value.copy_(_stepped(value))
        yield
    finally:
        for address, value in vectors.items():
            value.copy_(before[address])


def _stepped(tensor: torch.Tensor) -> torch.Tensor:
    """Every float32 a rounding step up or down, by turns; what is coarser is exact in the arithmetic that follows.  Whole numbers
    stay: they may be masks, or indices."""
    if tensor.dtype != torch.float32 or not tensor.numel():
        return tensor
    step = torch.finfo(tensor.dtype).eps
    signs = torch.ones(tensor.numel(), device=tensor.device, dtype=tensor.dtype)
    signs[::2] = -1
    other = tensor + tensor * (signs.reshape(tensor.shape) * step)
    return torch.where(tensor == tensor.round(), tensor, other)
