"""Weights that are tensor subclasses (torchao's quantized tensors, say) as the plain tensors inside them.

Instead of `layer.weight` there is a submodule `layer.weight_tensors` whose parameters are the inner tensors (`qdata`, `scale`), and
the layer's class gets a property `weight`, which puts the subclass together again.  torch.export then
sees its operations, and stores plain tensors.  `__tensor_flatten__` and its counterpart are PyTorch's own protocol for that
(torch/utils/_python_dispatch.py, read in 2.11 and 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SUFFIX = "_tensors"
"""Of the submodule's name; torch.export finds no submodule that a property hides."""


class InnerTensors(torch.nn.Module):
    """The plain tensors of one weight that is a tensor subclass, by their names in it; `rebuilt` gives the subclass."""

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

    def rebuilt(self) -> torch.Tensor:
        """The subclass over the tensors that are here now."""
        parts = {name: getattr(self, name) for name in self._names}
        inner = {name: part.rebuilt() if isinstance(part, InnerTensors) else part for name, part in parts.items()}
        tensor: torch.Tensor = self._kind.__tensor_unflatten__(inner, self._context, self._shape, self._strides)
        return tensor


def subclass_weights(module: torch.nn.Module) -> list[str]:
    """The names of a module's own parameters and buffers that are tensor subclasses with plain tensors inside."""
    weights = {**module._parameters, **module._buffers}
    return [name for name, value in weights.items() if value is not None and is_traceable_wrapper_subclass(value)]


def with_inner_tensors(module: torch.nn.Module) -> None:
    """Replaces a module's weights that are tensor subclasses; its class becomes a subclass of what it was, of the same name."""
    names = subclass_weights(module)
    for name in names:
        holder = module._parameters if name in module._parameters else module._buffers
        module._modules[name + SUFFIX] = InnerTensors(holder.pop(name))
    kind = type(module)
    members: dict[str, Any] = {name: _rebuilding(name) for name in names}
    module.__class__ = type(kind.__name__, (kind,), {**members, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _rebuilding(name: str) -> property:
    def get(module: Any) -> torch.Tensor:
        held: InnerTensors = module._modules[name + SUFFIX]
        return held.rebuilt()

    return property(get)
