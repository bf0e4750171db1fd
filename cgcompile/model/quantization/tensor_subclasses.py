"""Converts weights that are tensor subclasses, for example torchao's quantized tensors, to the plain tensors inside them.

A submodule `layer.weight_tensors` replaces `layer.weight`.  Its parameters are the inner tensors (`qdata`, `scale`).  The layer's
class gets a property `weight`, which rebuilds the subclass.  So torch.export traces the subclass's operations, and stores plain
tensors.
`__tensor_flatten__` and `__tensor_unflatten__` are PyTorch's protocol for this (torch/utils/_python_dispatch.py, read in 2.11 and
2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SUFFIX = "_tensors"
"""Suffix of the submodule's name.  With the name of the property, the submodule would be hidden from torch.export."""


class InnerTensors(torch.nn.Module):
    """The plain tensors inside one tensor subclass, with the names that they have there."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        names, self._context = weight.__tensor_flatten__()
        self._kind, self._shape, self._strides = type(weight), tuple(weight.shape), tuple(weight.stride())
        for name in names:
            inner = getattr(weight, name)
            if is_traceable_wrapper_subclass(inner):
                self.add_module(name, InnerTensors(inner))
            elif isinstance(weight, torch.nn.Parameter):
                self.register_parameter(name, torch.nn.Parameter(inner.detach(), requires_grad=False))
            else:
                self.register_buffer(name, inner)
        self._names = tuple(names)

    def rebuild(self) -> torch.Tensor:
        """Returns a tensor of the subclass with the current inner tensors."""
        parts = {name: getattr(self, name) for name in self._names}
        inner = {name: part.rebuild() if isinstance(part, InnerTensors) else part for name, part in parts.items()}
        tensor: torch.Tensor = self._kind.__tensor_unflatten__(inner, self._context, self._shape, self._strides)
        return tensor


def subclass_weights(module: torch.nn.Module) -> list[str]:
    """Returns the names of a module's parameters and buffers that are tensor subclasses with plain tensors inside."""
    weights = {**module._parameters, **module._buffers}
    return [name for name, value in weights.items() if value is not None and is_traceable_wrapper_subclass(value)]


def replace_subclass_weights(module: torch.nn.Module) -> None:
    """Replaces a module's tensor subclasses, in place.  The module's class becomes a subclass of the original class, with the same
    name."""
    names = subclass_weights(module)
    for name in names:
        holder = module._parameters if name in module._parameters else module._buffers
        module._modules[name + SUFFIX] = InnerTensors(holder.pop(name))
    kind = type(module)
    members: dict[str, Any] = {name: _rebuilt_weight(name) for name in names}
    module.__class__ = type(kind.__name__, (kind,), {**members, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _rebuilt_weight(name: str) -> property:

    def get(module: Any) -> torch.Tensor:
        inner_tensors: InnerTensors = module._modules[name + SUFFIX]
        return inner_tensors.rebuild()

    return property(get)
