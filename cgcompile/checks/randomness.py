"""Rules about random numbers, and about training mode."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from cgbundle.format.schema import Finding

from ..export.functionalization import keeps_rng_state
from ..export.higher_order.conditionals import is_conditional
from ..transforms.rng.recurrent_dropout import RECURRENT
from ..transforms.rng.rewrite import can_rewrite, drawn, draws, generator_buffers, is_random, supported
from .context import NOTE, REFUSE, RuleContext, Severity, finding, operator

INSIDE = "inside this operator, only a cross-compiled graph can draw random numbers"
"""AOTInductor's code for a CPU crashed with a segmentation fault if a branch or a loop drew random numbers (torch 2.13)."""


def with_moved_draws(findings: Sequence[Finding], placed: Collection[str], program: ExportedProgram) -> tuple[Finding, ...]:
    """Changes findings about random numbers inside branches and loops in `placed`, which run on the host, to severity refuse."""
    moved = {node.name for node in program.graph.nodes if is_conditional(node) and node.name in placed}
    return tuple(
        [
            replace(finding, severity=REFUSE, effect=INSIDE, fix="draw the numbers before it, or pass them as an input")
            if finding.rule == "random-operation" and finding.severity == NOTE and finding.node in moved
            else finding
            for finding in findings
        ]
    )


def random_operation(context: RuleContext) -> Iterable[Finding]:
    """An operation that draws random numbers: dropout in training, rand, bernoulli, multinomial, attention with dropout.

    What it looks for: operators with the tag `nondeterministic_seeded`, and attention, except for calls that draw nothing.
    Why CUDA cares: a bundle without torch has no generator to register with a graph, and would repeat its numbers.  So the program
    computes the numbers itself, from a seed and a count of its calls in its state.
    Effect: every call and every iteration of a loop has new numbers, which differ from PyTorch's; `program.seed(n)` repeats them.
    Other operators (poisson, binomial, gamma) and the user's generators are refused.  Random operators inside of scan or map, or
    of a branch or loop on the host, are refused too.  So is a model that draws numbers and calls a saved program that also does.
    Fix: none needed; call `model.eval()` if the dropout is not intended.  For a refused operator, pass the random tensor as an
    input.
    Source: torch.Tag.nondeterministic_seeded; torch.cuda.CUDAGraph.register_generator_state; transforms/rng.
    """
    saved = generator_buffers(context.program)
    if len(saved) + draws(context.program) > 1:
        yield finding(
            "random-operation", REFUSE, "the model draws random numbers, and calls a saved program that also draws them", None,
            "a bundle has one generator, so the generator of the saved program would have no seed",
            "build from the model that was saved",
        )  # fmt: skip
    rewritten = set(drawn(context.program.graph_module))
    for node, top in context.calls():
        if is_random(node):
            name = operator(node)
            inside = top != node.name
            if node in rewritten and can_rewrite(node) and (not inside or (context.conditionals and node.target not in RECURRENT)):
                severity: Severity = NOTE
                effect, fix = "fresh numbers at every call; program.seed(n) repeats them", "none needed"
            else:
                severity = REFUSE
                effect, fix = _obstacle(node, top), "pass the random tensor as an input"
            if "dropout" in name:
                fix += "; call model.eval() if the dropout was not meant"
            yield finding("random-operation", severity, f"{name} draws random numbers", node, effect, fix, top)


def _obstacle(node: Node, top: str) -> str:
    """Returns why a random operator cannot be rewritten."""
    if top != node.name:
        return INSIDE
    if node.target in supported():
        return "a bundle supports only its own generator"
    return "a bundle has no generator for it, and would repeat the same numbers"


def rng_state_operation(context: RuleContext) -> Iterable[Finding]:
    """Operators that save or restore the state of a random generator, as activation checkpointing does.

    What it looks for: the higher-order operators run_and_save_rng_state and run_with_rng_state, and their graph-safe versions.
    Why CUDA forbids it: the CPU reads and sets the state, and waits for the GPU; a replay runs no CPU code.
    Effect: no bundle can be built.
    Fix: inference needs no activation checkpointing: call `model.gradient_checkpointing_disable()`, or the module without the
    checkpoint.
    Source: FORBIDDEN_CUDAGRAPH_OPS in torch/_inductor/utils.py.
    """
    for node, top in context.calls():
        if keeps_rng_state(node):
            yield finding(
                "rng-state-operation", REFUSE, f"{operator(node)} saves or restores the state of a random generator", node,
                "random numbers cannot be replayed", "switch activation checkpointing off: inference does not need it", top,
            )  # fmt: skip


def training_mode(context: RuleContext) -> Iterable[Finding]:
    """A model in training mode with dropout or batch normalization, which behave differently in training.

    What it looks for: `module.training` and modules of these kinds.
    Why it matters: these modules are built in training mode (random-operation, mutated-buffer), which inference rarely needs.
    Effect: information; see the other findings.
    Fix: leave `--train` out (`train=True` in Python): without it the build uses eval().
    Source: torch.nn.Module.eval.
    """
    modules = list(context.exported.flat.model.modules())
    if any(module.training for module in modules) and any(
        isinstance(module, torch.nn.modules.dropout._DropoutNd | torch.nn.modules.batchnorm._BatchNorm) for module in modules
    ):
        yield finding(
            "training-mode", NOTE, "the model is in training mode", None, "dropout and batch normalization act as in training",
            "leave --train out (train=True in Python): the model is then built as model.eval() makes it",
        )  # fmt: skip
