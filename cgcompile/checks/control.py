"""The rule about control flow operators."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cgbundle.format.schema import Finding

from .context import HOST, RuleContext, finding

OPERATORS = frozenset({"cond", "while_loop", "map", "map_impl", "scan"})
"""Higher-order operators whose branch or number of turns something else than the program's order decides.  `associative_scan` is
not one: Inductor makes a kernel of it."""


def control_flow(context: RuleContext) -> Iterable[Finding]:
    """Control flow as operators: `torch.cond`, while_loop, map, scan.

    What it looks for: these higher-order operators, anywhere in the program.
    Why CUDA forbids it: a tensor, which the CPU waits for, decides what runs and how often; a graph is a fixed order of kernels.  A
    capture by PyTorch makes none of the conditional nodes of CUDA 12.4.
    Effect: the operator with all its branches runs on the host.
    Fix: `torch.where` computes both sides and chooses; a loop with a fixed number of turns in Python is unrolled.
    Source: "Conditional ops" in Scheduler.should_partition (torch/_inductor/scheduler.py); is_cudagraph_unsafe_op in
    torch/_inductor/utils.py.
    """
    for node, top in context.calls():
        if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in OPERATORS and top == node.name:
            yield finding(
                "control-flow", HOST, f"{node.target.name().removesuffix('_impl')} decides on the CPU what runs", node,
                context.effect(top), "torch.where computes both sides and chooses; a fixed number of turns can be a Python loop",
            )  # fmt: skip
