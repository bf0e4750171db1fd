"""The module of a straight part: what it writes to.  Pure FX."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from .node_kinds import is_view


def mistakable(places: Sequence[Node], values: Sequence[Any]) -> list[int]:
    """Which of the values, that are to be written to inputs, a compiler may take for another of these inputs.  Inductor takes
    operations out that change nothing, copies too, and then writes an input before it reads it for another one (torch 2.11 and
    2.13, `remove_noop_ops` in torch/_inductor/fx_passes/post_grad.py)."""
    pairs = enumerate(zip(places, values, strict=True))
    return [number for number, (place, value) in pairs if _simple_sources(value) & ({*places} - {place})]


SIMPLE = frozenset({"clone", "contiguous", "to", "_to_copy", "add", "sub", "mul", "div", "pow", "copy", "cat", "repeat", "where"})
"""Operations beside views that may change nothing, depending on what they are given."""


def _simple_sources(node: Any) -> set[Node]:
    """The inputs that a value may be, for all that a compiler can find out about its operations."""
    found: set[Node] = set()
    waiting = [node] if isinstance(node, Node) else []
    while waiting:
        each = waiting.pop()
        packet = getattr(each.target, "overloadpacket", None)
        if each.op == "placeholder":
            found.add(each)
        elif is_view(each) or each.target is operator.getitem or getattr(packet, "__name__", "") in SIMPLE:
            waiting += each.all_input_nodes
    return found
