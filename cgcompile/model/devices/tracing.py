"""Operations and tensors while torch may be tracing them.

Private interfaces (torch 2.11, 2.13): `get_proxy_mode` and its `tracer`; `FakeTensor.constant` and `FakeTensor.fake_device`, the
data that a fake tensor stands for, if it is known, and its device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from ..user_code import user_frame


def called(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Calls an operation.  What it adds to a traced graph gets the user's innermost line: torch notes lines of forward() alone."""
    mode = get_proxy_mode()
    if mode is None:
        return func(*args, **kwargs)
    nodes = mode.tracer.graph.nodes
    before = next(iter(reversed(nodes)), None)
    result = func(*args, **kwargs)
    line = user_frame()
    for node in reversed(nodes):
        if node is before:
            break
        trace = node.meta.get("stack_trace") or ""
        if line not in trace:
            node.meta["stack_trace"] = f"{trace}\n{line}"
    return result


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of `values`."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def is_traced(values: Any) -> bool:
    """Whether an operation on `values` becomes a part of a graph, or runs on tensors without data."""
    return get_proxy_mode() is not None or any(isinstance(tensor, FakeTensor) for tensor in tensors_in(values))


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether nobody knows what a traced tensor holds."""
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def real_device(tensor: torch.Tensor) -> torch.device:
    """Where a tensor is, whatever the user's code is told.  Called while DeviceTracking is not active."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
