"""The rule about control flow operators."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from cgbundle.format.schema import Finding

from ..export.higher_order.conditionals import COND, CONTROL_FLOW, WHILE, higher_order, is_conditional, obstacle
from .context import HOST, NOTE, RuleContext, finding

WHOLE = {COND: ", and both branches run there", WHILE: ", and every iteration runs there"}
"""Part of the message about a branch or a loop that must run on the host."""


def control_flow(context: RuleContext) -> Iterable[Finding]:
    """Control flow as operators: `torch.cond`, while_loop, map, scan.

    What it looks for: these higher-order operators, anywhere in the program.
    Why CUDA forbids it: a tensor determines which operations run and how often.  A graph is a fixed sequence of kernels, except for
    conditional nodes (CUDA 12.4), whose bodies have the same restrictions.
    Effect: `cond` and `while_loop` become conditional nodes: the GPU decides, and nothing waits.  If an operation in a body must
    run on the host, the whole operator runs there, with all branches and iterations.  So do map and scan along a declared
    dimension.
    Fix: `torch.where` computes both branches and selects; a Python loop with a fixed number of iterations is unrolled.
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
                "control-flow", NOTE, f"the GPU evaluates the condition of {name}", node,
                "a conditional node of the graph: no extra launch, and the CPU does not wait", "none needed",
            )  # fmt: skip
        else:
            why = f"{WHOLE[name]}, since {reason}" if context.conditionals and is_conditional(node) else ""
            yield finding(
                "control-flow", HOST, f"the CPU evaluates the condition of {name}{why}", node, context.effect(top),
                "torch.where computes both branches and selects; with a fixed number of iterations, use a Python loop",
            )  # fmt: skip


def with_moved_control_flow(findings: Sequence[Finding], placed: Collection[str]) -> tuple[Finding, ...]:
    """Changes the findings of branches and loops in `placed` to severity host.  They run on the host because an operation inside
    them does, or one that they depend on."""
    inner_causes = {cause.node: cause for cause in reversed(findings) if cause.severity == HOST and cause.rule != "control-flow"}

    def moved(finding: Finding) -> Finding:
        name = finding.message.rpartition(" ")[2]
        cause = inner_causes.get(finding.node)
        cause_text = ", ".join(filter(None, [cause.rule, cause.where])) if cause else ""
        alone = "it must be in one region with an operation on the host"
        why = f"an operation inside it runs on the host ({cause_text})" if cause_text else alone
        return replace(
            finding,
            severity=HOST,
            message=f"the CPU evaluates the condition of {name}{WHOLE[name]}, since {why}",
            effect="this operation runs on the host between two graphs",
            fix="remove the operations that run on the host from it",
        )

    return tuple(
        [
            moved(finding) if finding.rule == "control-flow" and finding.severity == NOTE and finding.node in placed else finding
            for finding in findings
        ]
    )
