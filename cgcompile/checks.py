"""check: what the model does that a bundle cannot replay faithfully, as findings.  Pure functions over the exported program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram, ExportGraphSignature

from cgbundle.schema import Finding

from .errors import Refused
from .export import PREFIX, Exported
from .source import is_user_file

REFUSE, HOST, NOTE = "refuse", "host", "note"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What the rules look at.  `signature` is that of the functional form of the program: export leaves writes in place as
    operations of the graph, and only there are they listed."""

    exported: Exported
    signature: ExportGraphSignature


def check(exported: Exported) -> tuple[Finding, ...]:
    """All findings of all rules, in the order of the rules."""
    subject = Subject(exported=exported, signature=exported.program.run_decompositions({}).graph_signature)
    return tuple([finding for rule in RULES for finding in rule(subject)])


def refuse(findings: Sequence[Finding], strict: bool, waive: Sequence[str]) -> None:
    """Raises Refused for the findings that stop a build: those of severity refuse and, when `strict`, those of severity host."""
    known = {rule.__name__.replace("_", "-") for rule in RULES}
    for name in waive:
        if name not in known:
            raise Refused(f"waive {name!r}: no such rule (rules: {', '.join(sorted(known))})")
    stopping = [f for f in findings if f.severity == REFUSE or (strict and f.severity == HOST)]
    for finding in stopping:
        if finding.rule in waive:
            raise Refused(f"waive {finding.rule!r}: this refusal cannot be waived: {finding.effect}", finding.fix)
        more = f" (and {len(stopping) - 1} more findings)" if len(stopping) > 1 else ""
        raise Refused(f"{finding.where or 'model'}: {finding.rule}: {finding.message}: {finding.effect}{more}", finding.fix)


def mutated_buffer(subject: Subject) -> Iterable[Finding]:
    """A buffer that forward() writes to (running statistics, a cache) is state; weights are mapped read-only and shared by
    processes."""
    for target in sorted(set(subject.signature.buffers_to_mutate.values())):
        yield _finding(
            "mutated-buffer", REFUSE, f"forward() writes to the buffer {target.removeprefix(PREFIX)!r}", None,
            "the replay would write to weights that processes share",
            "return the new value as an output and pass it in as an input",
        )  # fmt: skip


def mutated_input(subject: Subject) -> Iterable[Finding]:
    """An input that forward() writes to: the caller's tensor, or a padded copy of it, would change or not depending on the call."""
    for target in sorted(set(subject.signature.user_inputs_to_mutate.values())):
        yield _finding(
            "mutated-input", REFUSE, f"forward() writes to its input {target!r}", None,
            "the caller's tensor would change in some calls and not in others",
            "clone the input before writing, and return the result",
        )  # fmt: skip


def random_operation(subject: Subject) -> Iterable[Finding]:
    """Random numbers: the exam could not tell a right result from a wrong one."""
    for node in _calls(subject.exported.program):
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _switched_off(node):
            yield _finding(
                "random-operation", REFUSE, f"{_operator(node)} draws random numbers", node,
                "results differ from call to call and cannot be verified",
                "call model.eval() if this is dropout, or pass the random tensor as an input",
            )  # fmt: skip


def _switched_off(node: Any) -> bool:
    """Whether a random operation draws nothing: dropout outside training, or with probability 0 (attention takes a dropout_p)."""
    arguments = node.target._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    values.update({argument.name: value for argument, value in zip(arguments, node.args, strict=False)})
    values.update(node.kwargs)
    return values.get("train") is False or values.get("training") is False or values.get("dropout_p") == 0


def training_mode(subject: Subject) -> Iterable[Finding]:
    """Dropout and batch normalization behave differently in training mode."""
    if any(module.training for module in subject.exported.flat.model.modules()) and any(
        isinstance(module, torch.nn.modules.dropout._DropoutNd | torch.nn.modules.batchnorm._BatchNorm)
        for module in subject.exported.flat.model.modules()
    ):
        yield _finding(
            "training-mode",
            NOTE,
            "the model is in training mode",
            None,
            "dropout and batch normalization act as in training",
            "call model.eval()",
        )


RULES: tuple[Callable[[Subject], Iterable[Finding]], ...] = (mutated_buffer, mutated_input, random_operation, training_mode)


def _finding(rule: str, severity: str, message: str, node: Any, effect: str, fix: str) -> Finding:
    where, source = place(node)
    return Finding(rule=rule, severity=severity, message=message, where=where, source=source, effect=effect, fix=fix)


def place(node: Any) -> tuple[str, str]:
    """(file:line, source line) of the user's code that a node comes from, or ("", "")."""
    trace = (node.meta.get("stack_trace") or "") if node is not None else ""
    for file, line, code in reversed(re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', trace)):
        if is_user_file(file):
            return f"{file}:{line}", code.strip()
    return "", ""


def _calls(program: ExportedProgram) -> Iterable[Any]:
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def _operator(node: Any) -> str:
    return str(node.target).removeprefix("aten.")
