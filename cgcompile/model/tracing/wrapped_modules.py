"""Removes wrappers of modules: torch.compile, nn.DataParallel and DistributedDataParallel.

A bundle is compiled for one device, so it needs no wrapper.  Weights have the names of the inner module.  torch.export accesses
children by name, so a child that a method of the class hides is renamed (`self.parameters = nn.ParameterList(...)`).

Private interface (torch 2.11, 2.13): `torch._dynamo.eval_frame.OptimizedModule`, by its name, and `_orig_mod`, the inner module.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ...errors import ModelError

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def unwrapped(model: nn.Module, label: str) -> tuple[nn.Module, tuple[str, ...]]:
    """Returns `model` without wrappers, and notes about them.  It is a copy with shared weights if it contains a wrapper or a child
    to rename.  Does not change `model`.  Raises source-invalid for a traced or scripted model."""
    notes: dict[str, None] = {}
    bare = _unwrapped(model, "the model", notes, {})
    if isinstance(bare, torch.jit.ScriptModule):
        text = f"{label}: the model is a {type(bare).__name__} of torch.jit, which has no Python code"
        raise ModelError("source-invalid", text, "give the module that was scripted or traced")
    return bare, tuple(notes)


def _unwrapped(module: nn.Module, path: str, notes: dict[str, None], seen: dict[int, nn.Module]) -> nn.Module:
    if id(module) in seen:
        return seen[id(module)]
    seen[id(module)] = module  # a module may contain itself
    if (inner := _inside(module)) is not None:
        kind = "torch.compile" if type(module).__name__ == "OptimizedModule" else type(module).__name__
        notes[f"{path} is wrapped by {kind}"] = None
        seen[id(module)] = _unwrapped(inner, path, notes, seen)
        return seen[id(module)]
    if isinstance(module, torch.jit.ScriptModule):
        _name_parameters(module)
        return module
    prefix = "" if path == "the model" else f"{path}."
    children = {
        name: child if child is None else _unwrapped(child, f"{prefix}{name}", notes, seen)
        for name, child in module._modules.items()
    }
    hidden = [name for name, child in module._modules.items() if child is not None and getattr(module, name) is not child]
    if hidden:
        notes.update(
            dict.fromkeys([f"{prefix}{name} is hidden by the method of that name, and is called {name}_" for name in hidden])
        )
        children = {f"{name}_" if name in hidden else name: child for name, child in children.items()}
    if hidden or any(child is not module._modules[name] for name, child in children.items()):
        copied = copy.copy(module)
        copied._modules = children
        seen[id(module)] = copied
    return seen[id(module)]


def _name_parameters(scripted: torch.jit.ScriptModule) -> None:
    """Converts tensors of a module from `torch.jit.load` to parameters, which torch.export needs.  They share memory."""
    for module in scripted.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            if not isinstance(value, nn.Parameter):
                setattr(module, name, nn.Parameter(value.detach(), requires_grad=value.requires_grad))


def _inside(module: Any) -> nn.Module | None:
    if isinstance(module, WRAPPERS):
        return module.module
    if type(module).__name__ == "OptimizedModule" and type(module).__module__.startswith("torch._dynamo"):
        inner: nn.Module = module._orig_mod
        return inner
    return None
