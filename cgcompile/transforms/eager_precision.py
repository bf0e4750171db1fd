"""Measures how exact eager PyTorch itself is.  Results change with the rounding of inputs, with the order of additions in a kernel,
and if a GPU rounds float32 operands to TF32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..model.devices.index_guard import FAILURES, guarded_indices
from ..model.flat_module import Reference, run_eager, without_tf32
from ..model.source import CPU
from ..util.tolerance import compare

WIDE = (torch.float64, torch.complex128)
"""Dtypes with smaller rounding errors than float32.  A change of float32 inputs by a rounding step does not measure these
errors."""


def eager_spread(reference: Reference, tensors: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """Returns per output the largest error of further eager runs, compared with the first.  In one run the float32 inputs change by
    a rounding step.  On a GPU, one more run has the same inputs, and one runs without TF32.  If no input can change, as with
    tokens, the 1-d float32 parameters do: norms and biases, which every layer has.

    The step changes how the model rounds values (activations quantized to int8: 3e-3 of the result measured).  It also shows
    results that are a small difference of large numbers (the one logit of a SigLIP: 1e-4; SmolLM2 after 2000 tokens that no
    call has read, as in the self-test of a cache: 5e-4).
    """
    first = run_eager(reference, tensors).outputs
    others = [_stepped(tensor) for tensor in tensors]
    unchanged = all(torch.equal(other, tensor) for other, tensor in zip(others, tensors, strict=True))
    try:
        with guarded_indices(tensors[0].device if tensors else CPU), _parameters_stepped(reference if unchanged else None):
            stepped = run_eager(reference, others).outputs  # a model may compute indices from floats
    except FAILURES:
        stepped = first  # the model may assert properties of its inputs
    reruns = []
    if any(output.is_cuda for output in first):
        reruns.append(run_eager(reference, tensors).outputs)
        with without_tf32():
            reruns.append(run_eager(reference, tensors).outputs)
    steps = [0.0 if want.dtype in WIDE else compare(want, other).error for want, other in zip(first, stepped, strict=True)]
    errors = [[compare(want, other).error for other in repeats] for want, *repeats in zip(first, *reruns, strict=True)]
    return tuple([max([step, *rerun_errors]) for step, rerun_errors in zip(steps, errors, strict=True)])


@contextmanager
def _parameters_stepped(reference: Reference | None) -> Iterator[None]:
    """Changes every 1-d float32 parameter by a rounding step inside the context.  Changes nothing for None."""
    parameters = reference.parameters() if isinstance(reference, torch.nn.Module) else ()
    plain = [value.detach() for value in parameters if type(value) is torch.nn.Parameter and value.layout is torch.strided]
    # by address, so that tied parameters change once
    vectors = {value.data_ptr(): value for value in plain if value.dtype == torch.float32 and value.dim() == 1}
    before = {address: value.clone() for address, value in vectors.items()}
    try:
        for value in vectors.values():
            value.copy_(_stepped(value))
        yield
    finally:
        for address, value in vectors.items():
            value.copy_(before[address])


def _stepped(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with every float32 changed by a rounding step, alternately up and down.  Other dtypes do not change:
    numbers of narrower dtypes are exact in the arithmetic that follows.  Whole numbers do not change, because they may be masks or
    indices."""
    if tensor.dtype != torch.float32 or not tensor.numel():
        return tensor
    step = torch.finfo(tensor.dtype).eps
    signs = torch.ones(tensor.numel(), device=tensor.device, dtype=tensor.dtype)
    signs[::2] = -1
    other = tensor + tensor * (signs.reshape(tensor.shape) * step)
    return torch.where(tensor == tensor.round(), tensor, other)
