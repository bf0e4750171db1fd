"""Replaces `torch.ao.nn.quantized.dynamic.Linear` by plain operations.  The weights of that class are packed for a CPU library.

The arithmetic is that of ATen's `quantized::linear_dynamic`.  One step (scale) and zero point apply to all activations
(ChooseQuantizationParams in aten/src/ATen/native/quantized/cpu/QuantUtils.h, read in 2.13).  Activations are rounded to multiples
of the step.  The product of integers is multiplied by the scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 6.1e-5
"""The smallest step of ATen (SMALL_SCALE_THRESHOLD in QuantUtils.h)."""

TINY = 2.0**-128
"""Steps up to this one have no reciprocal in float32.  ATen replaces such a step by 0.1."""

LEVELS = (127, 255)
"""The largest quantized activation.  127 keeps the sum of two products within 16 bits, which some CPU libraries need."""


class PackedParams(torch.nn.Module):
    """The contents of the module's `_packed_params` as plain tensors.  `weight` is (out, in) int8.  `scale` and `zero_point` are
    float32, one value or one per row.  `bias` is (out,).  `zero_point` is None if it is 0, `bias` if there is none."""

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        rows = weight.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
        zero = weight.q_per_channel_zero_points() if rows else torch.tensor(weight.q_zero_point())
        scale = weight.q_per_channel_scales() if rows else torch.tensor(weight.q_scale())
        self.register_buffer("weight", weight.int_repr())
        self.register_buffer("scale", scale.to(torch.float32))
        self.register_buffer("zero_point", zero.to(torch.float32) if bool((zero != 0).any()) else None)
        self.register_buffer("bias", None if bias is None else bias.detach())


class DynamicLinear(torch.nn.Module):
    """Maps x (..., in) to (..., out) of the same floating dtype.  `levels` is one of LEVELS.  Its tensors are in a submodule
    `_packed_params`.  In the original state_dict, `scale` and `zero_point` of the module are other tensors, so these names must
    stay free."""

    def __init__(self, weight: Tensor, bias: Tensor | None, levels: int) -> None:
        super().__init__()
        self.levels = levels
        self._packed_params = PackedParams(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        params = self._packed_params
        activations = x.to(torch.float32)
        step, zero = activation_step(activations, self.levels)
        quantized = (torch.round(activations * (1.0 / step)) + zero).clamp(0, 255) - zero
        if self.levels == LEVELS[0] and x.device.type == "cpu":
            # all values are in -127..127; cuBLAS does not support this product for up to 16 rows
            product = torch._int_mm(quantized.to(torch.int8).reshape(-1, x.shape[-1]), params.weight.t())
            output = product.to(torch.float32).reshape(*x.shape[:-1], params.weight.shape[0])
        else:
            output = torch.nn.functional.linear(quantized, params.weight.to(torch.float32))
        if params.zero_point is not None:
            output = output - quantized.sum(-1, keepdim=True) * params.zero_point
        output = output * (step * params.scale)
        return (output if params.bias is None else output + params.bias).to(x.dtype)


def activation_step(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Returns the step and zero point of an activation, float32 scalars: x is about step * (q - zero), q from 0 to `levels`."""
    low, high = x.amin().clamp(max=0.0).to(torch.float64), x.amax().clamp(min=0.0).to(torch.float64)
    exact_step = ((high - low) / levels).to(torch.float32).to(torch.float64)
    step = torch.where(exact_step <= TINY, 0.1, exact_step)
    zero = torch.round((-low / step).clamp(0, levels))
    return step.clamp(min=SMALLEST).to(torch.float32), zero.to(torch.float32)
