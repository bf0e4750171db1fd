"""The rule about control flow operators."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from cgbundle.format.schema import Finding

from ..export.higher_order.conditionals import CONTROL_FLOW, higher_order, is_conditional, obstacle
from .context import HOST, NOTE, RuleContext, finding


def control_flow(context: RuleContext) -> Iterable[Finding]:
    """Control flow as operators: `torch.cond`, while_loop, map, scan.

    What it looks for: these higher-order operators, anywhere in the program.
    Why CUDA forbids it: a tensor decides what runs and how often; a graph is a fixed order of kernels, but for its conditional
    nodes (CUDA 12.4), whose bodies hold what a graph does.  A capture by PyTorch makes none of these.
    Effect: where launches are traced, `cond` and `while_loop` are conditional nodes: the GPU decides, and nothing waits.  Else, and
    where something in a body is the host's, the operator with all its branches runs on the host.
    Fix: `torch.where` computes both sides and chooses; a loop with a fixed number of turns in Python is unrolled.
    Source: cuGraphConditionalHandleCreate (CUDA driver API); "Conditional ops" in Scheduler.should_partition
    (torch/_inductor/scheduler.py); is_cudagraph_unsafe_op in torch/_inductor/utils.py.
    """
    top_level = {node.name: node for node in context.program.graph.nodes}
    for node, top in context.calls():
        if higher_order(node) not in CONTROL_FLOW or top != node.name or top_level.get(top) is not node:
            continue
        name = higher_order(node).removesuffix("_impl")
        reason = obstacle(node, context.program.graph_module)
        if is_conditional(node) and context.conditionals and not reason:
            yield finding(
                "control-flow", NOTE, f"{name} decides on the GPU what runs", node,
                "a conditional node of the graph: no launch of its own, and the CPU waits for nothing", "none needed",
            )  # fmt: skip
        else:
            why = f", since {reason}" if context.conditionals and is_conditional(node) else ""
            yield finding(
                "control-flow", HOST, f"{name} decides on the CPU what runs{why}", node,
                context.effect(top), "torch.where computes both sides and chooses; a fixed number of turns can be a Python loop",
            )  # fmt: skip


def with_moved_control_flow(findings: Sequence[Finding], placed: Collection[str]) -> tuple[Finding, ...]:
    """The findings, with branches and loops that are `placed` on the host after all: for something inside of them, or around."""
    why = "decides on the CPU what runs, since it is tied to an operation on the host"
    return tuple(
        [
            replace(
                each,
                severity=HOST,
                message=f"{each.message.partition(' ')[0]} {why}",
                effect="the operator with all its branches runs on the host",
                fix="take what runs on the host out of it",
            )
            if each.rule == "control-flow" and each.severity == NOTE and each.node in placed
            else each
            for each in findings
        ]
    )
