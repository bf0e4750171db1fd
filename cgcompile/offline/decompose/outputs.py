"""Gives the outputs of a retraced program the required strides, and copies new values into the tensors that it writes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

COPY = torch.ops.aten.copy_.default

ALIGNED = 16
"""Kernels are compiled for tensors whose addresses are multiples of this many bytes."""


def with_strides(result: Any, strides: tuple[int, ...] | None) -> Any:
    """Returns an output that has these strides and an aligned address.  Copies it if needed."""
    if strides is None:
        return result
    if same_layout(result.shape, result.stride(), strides) and not result.storage_offset() * result.element_size() % ALIGNED:
        return result
    order = sorted(range(result.dim()), key=lambda axis: (-strides[axis], axis))
    dense = result.permute(order).clone(memory_format=torch.contiguous_format)
    return dense.permute([order.index(axis) for axis in range(result.dim())])


def same_layout(shape: Sequence[int], first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether two tuples of strides describe the same layout.  Strides of axes with one element and of empty tensors do not
    matter."""
    pairs = zip(shape, first, second, strict=True)
    return 0 in shape or all(size == 1 or first_stride == second_stride for size, first_stride, second_stride in pairs)


def copy_back(traced: torch.fx.GraphModule, written: Sequence[int]) -> None:
    """Removes the last outputs, which are new values of the inputs at the positions `written`, and copies them into these
    inputs."""
    (output,) = traced.graph.find_nodes(op="output")
    placeholders = traced.graph.find_nodes(op="placeholder")
    count = len(output.args[0]) - len(written)
    changed = {placeholders[index] for index in written}
    values = [
        value if value is placeholders[index] or _base(value) not in changed else _cloned(traced.graph, output, value)
        for index, value in zip(written, output.args[0][count:], strict=True)
    ]
    for index, value in zip(written, values, strict=True):
        if value is placeholders[index]:
            continue
        with traced.graph.inserting_before(output):
            copy_node = traced.graph.call_function(COPY, (placeholders[index], value))
        copy_node.meta["val"] = placeholders[index].meta["val"]
    output.args = (output.args[0][:count],)
    traced.recompile()


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """The node that a node is a view of, or itself."""
    while getattr(node.target, "is_view", False) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _cloned(graph: torch.fx.Graph, before: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    """Clones a tensor before anything is copied back, because the new value of one input may be the old value of another."""
    with graph.inserting_before(before):
        clone_node = graph.call_function(torch.ops.aten.clone.default, (value,))
    clone_node.meta["val"] = value.meta["val"]
    return clone_node
