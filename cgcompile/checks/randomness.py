"""Rules about random numbers, and about the mode that draws them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from cgbundle.schema import Finding

from .subject import NOTE, REFUSE, Subject, all_calls, arguments, finding, operator

RNG_STATE = frozenset({"run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"})
"""Higher-order operators that save and restore the state of a random generator."""


def random_operation(subject: Subject) -> Iterable[Finding]:
    """An operation that draws random numbers: dropout in training, rand, randn, bernoulli, multinomial, and attention with a
    dropout probability.

    What it looks for: operators tagged `nondeterministic_seeded`, but for those that draw nothing (dropout outside training, a
    probability of 0).

    Why CUDA cares: a graph can hold random kernels if the generator is registered with it and its seed and offset lie in device
    memory that is updated before each replay; a bundle without torch has no such generator, and would draw the same numbers each
    time.

    Effect: no bundle can be built: the exam could not tell a right result from a wrong one.

    Fix: `model.eval()` if this is dropout; or pass the random tensor as an input.

    Source: torch.Tag.nondeterministic_seeded; CUDAGeneratorImpl and torch.cuda.CUDAGraph.register_generator_state in PyTorch.
    """
    for node, top in subject.calls():
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _switched_off(node):
            yield finding(
                "random-operation", REFUSE, f"{operator(node)} draws random numbers", node,
                "results differ from call to call and cannot be verified",
                "call model.eval() if this is dropout, or pass the random tensor as an input", top,
            )  # fmt: skip


def _switched_off(node: Node) -> bool:
    """Whether a random operation draws nothing: dropout outside training, or with probability 0 (attention takes a dropout_p)."""
    values = arguments(node)
    never = values.get("dropout_p") == 0 or (node.target is torch.ops.aten.dropout.default and values.get("p") == 0)
    return never or values.get("train") is False or values.get("training") is False


def rng_state_operation(subject: Subject) -> Iterable[Finding]:
    """Operators that save or restore the state of a random generator: activation checkpointing makes them.

    What it looks for: the higher-order operators run_and_save_rng_state, run_with_rng_state and their graph-safe kind.

    Why CUDA forbids it: the state is read to and set from the CPU, which waits for the GPU; in a replay nobody sets it.

    Effect: no bundle can be built.

    Fix: inference needs no activation checkpointing: switch it off (`model.gradient_checkpointing_disable()`, or call the module
    itself instead of torch.utils.checkpoint).

    Source: FORBIDDEN_CUDAGRAPH_OPS in torch/_inductor/utils.py.
    """
    for node, top in subject.calls():
        if _keeps_rng_state(node):
            yield finding(
                "rng-state-operation", REFUSE, f"{operator(node)} saves or restores the state of a random generator", node,
                "random numbers cannot be replayed", "switch activation checkpointing off: inference does not need it", top,
            )  # fmt: skip


def keeps_rng_state(module: torch.fx.GraphModule) -> bool:
    """Whether a program holds an operator of RNG_STATE."""
    return any(_keeps_rng_state(node) for node, _ in all_calls(module))


def _keeps_rng_state(node: Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in RNG_STATE


def training_mode(subject: Subject) -> Iterable[Finding]:
    """A model in training mode that holds dropout or batch normalization, which behave differently there.

    What it looks for: `module.training` and modules of these kinds.

    Why it matters: dropout draws random numbers (random-operation), batch normalization takes the statistics of the batch and
    writes them to its buffers (mutated-buffer): neither is what inference means.

    Effect: information; the other rules refuse what cannot be replayed.

    Fix: `model.eval()`.

    Source: torch.nn.Module.eval.
    """
    modules = list(subject.exported.flat.model.modules())
    if any(module.training for module in modules) and any(
        isinstance(module, torch.nn.modules.dropout._DropoutNd | torch.nn.modules.batchnorm._BatchNorm) for module in modules
    ):
        yield finding(
            "training-mode", NOTE, "the model is in training mode", None, "dropout and batch normalization act as in training",
            "call model.eval()",
        )  # fmt: skip
