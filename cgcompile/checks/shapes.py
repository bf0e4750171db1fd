"""Rules about sizes that depend on data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from cgbundle.format.schema import Finding
from cgbundle.format.shapes import text

from .context import HOST, NOTE, REFUSE, RuleContext, finding, operator
from .host_placement import depends, has_tensor, introduces_symbols, unbacked
from .scalars import READS, SELECTS, selects

FIXES = {
    "nonzero": "torch.nonzero_static(x, size=n) has a fixed size; a mask and torch.where need no indices at all",
    "index": "keep the mask: torch.where(mask, x, 0) instead of x[mask]",
    "masked_select": "keep the mask: torch.where(mask, x, 0) instead of torch.masked_select(x, mask)",
    "_unique2": "sort, and compare neighbours: both have a fixed size",
    "unique_dim": "sort, and compare neighbours: both have a fixed size",
    "unique_consecutive": "compare neighbours: that has a fixed size",
    "repeat_interleave": "give repeats as a number, or output_size=",
    "bincount": "torch.zeros(n).scatter_add_(0, x, torch.ones_like(x)) has a fixed size",
    "_pack_padded_sequence": "run the padded sequence, and mask what is behind each length",
}
"""What to write instead, by operator."""

CALLED = {"index": "indexing with a boolean mask", "_unique2": "unique", "_pack_padded_sequence": "packing a sequence"}
"""Names of operators in messages."""

FIX = "pad to a fixed size, and pass a mask or a length as a tensor"


def data_dependent_shape(context: RuleContext) -> Iterable[Finding]:
    """An operation whose result has a size that depends on the values of its inputs: nonzero, `x[mask]`, unique, bincount, ...

    What it looks for: a value whose sizes, strides or offset have an unbacked symbol that no input of the operation has, and
    outputs with such a size.
    Why CUDA forbids it: the host waits for the size to allocate the result and to set the grid of the next kernel; a
    recorded kernel has fixed addresses and a fixed grid.
    Effect: the operation, and operations on tensors of such sizes, run on the host.  An output of this kind is computed in the
    graph, at the largest possible size.  A call returns it with its true size, and is never padded or chunked.  This works for
    nonzero, where, masks as indices, masked_select, unique, unique_consecutive and torchvision's nms.  Their results may go through
    operators that compute each row separately, sort, cat, sums, softmax and matrix products.  Other outputs are refused: sizes
    without a bound (repeat_interleave with a tensor, bincount), rows in another order (flip), writes in place.
    Fix: use a mask instead of a selection; pad to a fixed size; return a length as a tensor.
    Source: get_first_incompatible_cudagraph_node in torch/_inductor/utils.py; "unbacked binding ops" in Scheduler.should_partition,
    torch/_inductor/scheduler.py.
    """
    for node, top in context.calls():
        nested = isinstance(node.target, torch._ops.HigherOrderOperator)
        if has_tensor(node) and introduces_symbols(node) and node.target not in SELECTS and not nested:
            name = operator(node)
            yield finding(
                "data-dependent-shape", HOST, f"{CALLED.get(name, name)} gives a result whose size depends on data", node,
                context.effect(top), FIXES.get(name, FIX), top,
            )  # fmt: skip
    bounded = {row.output: row for row in context.exported.flat.bounded}
    for place, (node, name) in enumerate(outputs(context)):
        if place in bounded:
            size = f"{text(bounded[place].bound)} elements along axis {bounded[place].axis}"
            yield finding(
                "data-dependent-shape", NOTE, f"the output {name!r} has a size that depends on data", node,
                f"it is computed with {size}, and returned with its true size; no call is padded or chunked", "",
            )  # fmt: skip
        if _sizes(node):
            yield finding(
                "data-dependent-shape", REFUSE, f"the output {name!r} has a size that depends on data", node,
                f"the size of an output must have a bound, and this one has none: {context.exported.unbounded or 'its size'}",
                "return it padded to a fixed size, and the length as a tensor",
            )  # fmt: skip
        elif depends(node):
            yield finding(
                "data-dependent-shape", REFUSE, f"the output {name!r} is a view at a place that depends on data", node,
                "the address of every output is fixed", "return a copy of it: .clone()",
            )  # fmt: skip


def data_dependent_select(context: RuleContext) -> Iterable[Finding]:
    """An index or a bound that is a tensor: `x[i]`, `x[:n]`, `x.narrow(0, i, 1)` with tensors of no dimensions.

    What it looks for: a number that the CPU reads from a tensor (host-scalar) and uses only as an index or a bound.
    Why CUDA forbids it: the host waits for the address of the view, and a recorded kernel has fixed addresses.
    Effect: the read, the view and all operations on the view run on the host.
    Fix: use `x.index_select(0, i.reshape(1)).squeeze(0)` or torch.gather; for a bound, use a mask: `torch.arange(len) < n`.
    Source: unbacked symbols in the storage offset: get_first_incompatible_cudagraph_node in torch/_inductor/utils.py.
    """
    for node, top in context.calls():
        if node.target in READS and selects(node):
            yield finding(
                "data-dependent-select", HOST, "the CPU reads an index from a tensor", node,
                context.effect(top),
                "x.index_select(axis, i.reshape(1)) or torch.gather reads the position on the GPU; mask instead of x[:n]", top,
            )  # fmt: skip


def _sizes(node: Node) -> frozenset[Any]:
    value = node.meta.get("val")
    return unbacked(list(value.shape)) if isinstance(value, torch.Tensor) else frozenset()


def outputs(context: RuleContext) -> Iterable[tuple[Node, str]]:
    """Returns the nodes that the program returns, with the user's names."""
    (last,) = [node for node in context.program.graph.nodes if node.op == "output"]
    names = context.exported.flat.names
    return [(node, name) for node, name in zip(last.args[0][-len(names) :], names, strict=True) if isinstance(node, Node)]
