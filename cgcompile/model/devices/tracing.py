"""Helpers for operations and tensors that torch may be tracing.

Private interfaces (torch 2.11, 2.13): `get_proxy_mode` and its `tracer`; `FakeTensor.constant`, the data of a fake tensor if it is
known; `FakeTensor.fake_device`, its device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from ..user_code import user_frame


def called(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Calls an operation.  Adds the user's innermost line to new nodes of the graph: torch records only lines of forward()."""
    mode = get_proxy_mode()
    if mode is None:
        return func(*args, **kwargs)
    nodes = mode.tracer.graph.nodes
    last_node = next(iter(reversed(nodes)), None)
    result = func(*args, **kwargs)
    line = user_frame()
    for node in reversed(nodes):
        if node is last_node:
            break
        trace = node.meta.get("stack_trace") or ""
        if line not in trace:
            node.meta["stack_trace"] = f"{trace}\n{line}"
    return result


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Returns the tensors among the leaves of `values`."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def is_traced(values: Any) -> bool:
    """Returns whether an operation on `values` is traced, or runs on tensors without data."""
    return get_proxy_mode() is not None or any(isinstance(tensor, FakeTensor) for tensor in tensors_in(values))


def has_no_data(tensor: torch.Tensor) -> bool:
    """Returns whether a traced tensor has no known data."""
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def real_device(tensor: torch.Tensor) -> torch.device:
    """Returns the device of a tensor, not the one that the user's code sees.  Call it while DeviceTracking is inactive."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
