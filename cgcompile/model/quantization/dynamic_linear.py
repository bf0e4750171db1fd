"""`torch.ao.nn.quantized.dynamic.Linear` in plain operations: its weights are packed for a library of the CPU, and opaque.

The arithmetic is that of ATen's `quantized::linear_dynamic`: one step and zero for the whole activation (ChooseQuantizationParams
in aten/src/ATen/native/quantized/cpu/QuantUtils.h, read in 2.13), rounded to whole steps, an integer product, one scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 6.1e-5
"""The smallest step that ATen chooses (SMALL_SCALE_THRESHOLD in QuantUtils.h)."""

TINY = 2.0**-128
"""Steps from here on down have no reciprocal in float32; ATen takes 0.1 instead."""

LEVELS = (127, 255)
"""The largest quantized activation: 127 keeps the sums of two products within 16 bits, which some libraries of the CPU need."""


class PackedParams(torch.nn.Module):
    """What the module's `_packed_params` hold, as plain tensors: `weight` (out, in) int8, its `scale` and `zero_point`, float32,
    one for all or one per row, and `bias` (out,).  `zero_point` is None where it is 0, `bias` where there is none."""

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
    """x (..., in) -> (..., out) of the same floating dtype.  `levels`: one of LEVELS.

    Its tensors are those of a submodule `_packed_params`: in the module's own state_dict `scale` and `zero_point` are others, which
    belong to no weight, and a name must not mean two things.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, levels: int) -> None:
        super().__init__()
        self.levels = levels
        self._packed_params = PackedParams(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        held = self._packed_params
        activations = x.to(torch.float32)
        step, zero = activation_step(activations, self.levels)
        steps = (torch.round(activations * (1.0 / step)) + zero).clamp(0, 255) - zero
        if self.levels == LEVELS[0] and x.device.type == "cpu":
            # all steps lie in -127..127; cuBLAS takes no such product of 16 rows or fewer
            product = torch._int_mm(steps.to(torch.int8).reshape(-1, x.shape[-1]), held.weight.t())
            output = product.to(torch.float32).reshape(*x.shape[:-1], held.weight.shape[0])
        else:
            output = torch.nn.functional.linear(steps, held.weight.to(torch.float32))
        if held.zero_point is not None:
            output = output - steps.sum(-1, keepdim=True) * held.zero_point
        output = output * (step * held.scale)
        return (output if held.bias is None else output + held.bias).to(x.dtype)


def activation_step(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Step and zero of an activation, float32 scalars: x is about step * (q - zero) for q from 0 to `levels`."""
    low, high = x.amin().clamp(max=0.0).to(torch.float64), x.amax().clamp(min=0.0).to(torch.float64)
    wide = ((high - low) / levels).to(torch.float32).to(torch.float64)
    step = torch.where(wide <= TINY, 0.1, wide)
    zero = torch.round((-low / step).clamp(0, levels))
    return step.clamp(min=SMALLEST).to(torch.float32), zero.to(torch.float32)
