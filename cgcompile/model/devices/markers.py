"""The marker operators for moves between the GPU and the host in a graph."""

from __future__ import annotations

import torch
from torch.fx import Node

_LIBRARY = torch.library.Library("cgcompile", "DEF")
for _name in ("to_host", "to_device"):
    _LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    _LIBRARY.impl(_name, lambda x: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake(f"cgcompile::{_name}", lambda x: torch.empty_like(x), lib=_LIBRARY)

TO_HOST, TO_DEVICE = torch.ops.cgcompile.to_host.default, torch.ops.cgcompile.to_device.default
"""Copies of a tensor to the other device.  On the CPU, where models are exported and compared, both operators clone the tensor."""

_NAMES = {TO_HOST: "to_host", TO_DEVICE: "to_device"}


def marker(node: Node) -> str:
    """Returns "to_host", "to_device", or "" if the node is not a marker."""
    return _NAMES.get(node.target, "") if node.op == "call_function" else ""
