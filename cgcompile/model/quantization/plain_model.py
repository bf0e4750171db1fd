"""Converts a model so that all weights are plain tensors, which torch.export and weights.safetensors support.

Private interface (torch 2.11, 2.13): `torch.ao.nn.quantized.dynamic.Linear`, its `_weight_bias` and `_packed_params`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.ao.nn.quantized.dynamic import Linear

from ...errors import ModelError
from .dynamic_linear import LEVELS, DynamicLinear
from .tensor_subclasses import replace_subclass_weights, subclass_weights

EXACT = 1e-5
"""Maximum error of the plain operations, relative to the largest value.  A larger one means a different rounding."""

PROBE = 8
"""Rows of the input for this comparison."""


def plain_model(model: torch.nn.Module, label: str) -> torch.nn.Module:
    """Returns `model`, or a copy if a weight is a tensor subclass or packed.  The copy shares weights; `model` does not change.
    Raises quantization-unsupported."""
    replacements: dict[int, torch.nn.Module] = {}
    return _plain(model, "", label, replacements)


def _plain(module: torch.nn.Module, path: str, label: str, replacements: dict[int, torch.nn.Module]) -> torch.nn.Module:
    if id(module) in replacements:
        return replacements[id(module)]
    replacements[id(module)] = module  # a module may contain itself
    if type(module) is Linear:
        replacements[id(module)] = _dynamic_linear(module, path, label)
        return replacements[id(module)]
    _refuse_packed(module, path, label)
    children = {
        name: child if child is None else _plain(child, f"{path}.{name}" if path else name, label, replacements)
        for name, child in module._modules.items()
    }
    changed = any(child is not module._modules[name] for name, child in children.items())
    if changed or subclass_weights(module):
        plain = copy.copy(module)
        plain._modules, plain._parameters, plain._buffers = children, dict(module._parameters), dict(module._buffers)
        if subclass_weights(plain):
            replace_subclass_weights(plain)
        replacements[id(module)] = plain
    return replacements[id(module)]


def _dynamic_linear(module: Any, path: str, label: str) -> torch.nn.Module:
    """Converts the module to plain operations.  Tries LEVELS until the results equal those of this CPU's library."""
    if module._packed_params.dtype is not torch.qint8:
        raise _refusal(module, path, label, f"packs {module._packed_params.dtype} for a library of the CPU")
    weight, bias = module._weight_bias()
    probe = torch.linspace(-1.0, 2.0, PROBE * module.in_features).reshape(PROBE, module.in_features).sin()
    with torch.no_grad():
        expected = module(probe)
        for levels in LEVELS:
            plain = DynamicLinear(weight, bias, levels).train(module.training)
            if bool((plain(probe) - expected).abs().max() <= EXACT * expected.abs().max()):
                return plain
    raise _refusal(module, path, label, "rounds otherwise than PyTorch's quantized::linear_dynamic does")


def _refuse_packed(module: torch.nn.Module, path: str, label: str) -> None:
    """Raises quantization-unsupported for a module with opaque objects or tensors of a quantized dtype."""
    weights = {**module._parameters, **module._buffers}
    quantized = next((name for name, value in weights.items() if value is not None and value.is_quantized), "")
    packed = next((name for name, value in vars(module).items() if type(value) is torch.ScriptObject), "")
    if quantized or packed or type(module).__module__.startswith("torch.ao.nn.quantized."):
        reason = (
            f"{quantized!r} has the dtype {weights[quantized].dtype}"
            if quantized
            else "weights are packed for a library of the CPU"
        )
        raise _refusal(module, path, label, reason)


def _refusal(module: torch.nn.Module, path: str, label: str, reason: str) -> ModelError:
    kind = type(module)
    return ModelError(
        "quantization-unsupported", f"{label}: {path or 'the model'} ({kind.__module__}.{kind.__qualname__}): {reason}"
    )
