"""The rule about collectives between the ranks of a model over several devices."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from cgbundle.format.schema import Finding

from .context import REFUSE, RuleContext, finding, operator

NAMESPACES = frozenset({
    "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem",
})  # fmt: skip

KNOWN = {
    "all_reduce": 2, "all_gather_into_tensor": 2, "reduce_scatter_tensor": 3, "all_to_all_single": 3, "broadcast": 2,
    "wait_tensor": None,
}  # fmt: skip
"""Supported operators of `_c10d_functional`, with the position of the group among their arguments."""

REDUCED = {"all_reduce": 1, "reduce_scatter_tensor": 1}
"""Operators that reduce, with the position of the reduction's name among their arguments."""

SUMS = (torch.bfloat16, torch.float16, torch.float32)


def unknown_collective(context: RuleContext) -> Iterable[Finding]:
    """A collective that bundles do not support.

    What it looks for: operators of torch.distributed except all_reduce, all_gather, reduce_scatter, all_to_all of equal parts and
    broadcast over all ranks.  Also sums of dtypes other than bfloat16, float16 and float32, other reductions, and collectives in a
    branch or a loop.
    Why: NCCL's kernels cannot be stored.  cgcompile has kernels for these collectives only.  All ranks launch them in one order.
    Effect: no bundle can be built.
    Fix: use one of these functional collectives of torch.distributed, with group.WORLD.
    Source: torch/distributed/_functional_collectives.py; cgcompile/targets/collectives/kernels.py.
    """
    for node, top in context.calls():
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in NAMESPACES:
            reason = _reason(node, nested=top != node.name)
            if not reason and context.target != "cuda":
                reason = "the ranks of a model are GPUs"
            if reason:
                yield finding(
                    "unknown-collective", REFUSE, f"{operator(node).removeprefix('_c10d_functional.')}: {reason}", node,
                    "no bundle can be built",
                    "all_reduce, all_gather, reduce_scatter, all_to_all_single or broadcast of "
                    "torch.distributed's functional collectives, over group.WORLD",
                    top,
                )  # fmt: skip


def _reason(node: Node, *, nested: bool) -> str:
    """Returns why a bundle does not support a collective, or ""."""
    name = node.target.name().partition("::")[2].partition(".")[0]
    if node.target.namespace != "_c10d_functional" or name not in KNOWN:
        return "cgcompile has no kernel for it"
    if nested:
        return "in a branch or a loop, which ranks may leave at different times"
    group_position = KNOWN[name]
    if group_position is None:
        return ""
    if not torch.distributed.is_initialized():
        return "the model is built for one device"
    if node.args[group_position] != torch.distributed.group.WORLD.group_name:
        return "its process group is not group.WORLD"
    if name in REDUCED:
        if node.args[REDUCED[name]] != "sum":
            return f"{node.args[REDUCED[name]]!r} is no sum"
        dtype = node.args[0].meta["val"].dtype
        if dtype not in SUMS:
            return f"a sum of {str(dtype).removeprefix('torch.')}"
    if name == "all_to_all_single" and len({str(size) for sizes in node.args[1:3] for size in sizes}) > 1:
        return "parts of different sizes"
    return ""
