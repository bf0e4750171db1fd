"""check: all rules over one program.  refuse: the findings that stop a build."""

from __future__ import annotations

from collections.abc import Sequence

from torch.export import ExportedProgram, ExportGraphSignature

from cgbundle.format.schema import Finding

from ..errors import ModelError
from ..export.exported import Exported, Traced
from ..model.module_attributes import ATTRIBUTE_FIX
from ..model.user_code import first_line
from . import flow
from .operators import check_host_ops
from .randomness import keeps_rng_state
from .rules import RULES, names
from .subject import HOST, REFUSE, Subject
from .weights import weight_names
from .writes import CLONE, RETURN, sharing

WRITES = frozenset({"mutated-input", "mutated-buffer", "random-operation"})
"""Rules about what a program changes: random numbers count their calls in a buffer."""

INSTEAD = "call model.eval() if this is dropout, or pass the random tensor as an input"

GPU_ONLY = frozenset({"several-devices", "pinned-memory"})
"""Rules that mean nothing where everything is on the host."""


def check(
    exported: Exported | Traced,
    target: str = "cuda",
    host_ops: Sequence[str] = (),
    signature: ExportGraphSignature | None = None,
) -> tuple[Finding, ...]:
    """All findings of all rules, in the order of the rules.

    `target`: "cuda" or "cpu".  The cpu target is one host region: what severity host means for a GPU does not exist there.
    `host_ops`: operators that the user keeps on the host, as `aten.topk`, `mylib::op` or `mylib.op.default`.
    `signature`: what `functional` gives for the program, where the caller has it.
    Raises host-op-unknown for one that the program does not call, and export-failed for a program that torch cannot make
    functional.
    """
    program = exported.program
    check_host_ops(program, host_ops)
    subject = Subject(
        exported=exported,
        signature=signature or functional(program),
        target=target,
        host_ops=tuple(host_ops),
        moved=flow.moved(program.graph, weight_names(program)),
        loose=flow.loose(program.graph),
    )
    found = [finding for rule in RULES for finding in rule(subject)]
    if target == "cpu":
        found = [finding for finding in found if finding.severity != HOST and finding.rule not in GPU_ONLY]
    return tuple(found)


def functional(program: ExportedProgram) -> ExportGraphSignature:
    """The signature of the functional form, which names the buffers and inputs that the program writes to, and which torch makes of
    no program that saves states of random generators: the rule rng-state-operation refuses those.  Raises export-failed."""
    if keeps_rng_state(program.graph_module):
        return program.graph_signature
    try:
        return program.run_decompositions({}).graph_signature
    except Exception as error:
        if "register it as buffer" in str(error):  # torch's words for an attribute that is written to in place
            raise ModelError("export-failed", f"model: {first_line(error).rstrip('.')}", ATTRIBUTE_FIX) from error
        if shared := sharing(program):
            raise ModelError(
                "export-failed",
                f"model: the buffers {shared[0]!r} and {shared[1]!r} share memory, and torch.export cannot follow writes to them",
                "give each a tensor of its own",
            ) from error
        raise ModelError(
            "export-failed",
            f"model: torch.export cannot make the program functional: {type(error).__name__}: {first_line(error)}",
            "leave torch.no_grad and torch.set_grad_enabled out of forward(): a bundle computes no gradients",
        ) from error


def written_inputs(signature: ExportGraphSignature) -> tuple[int, ...]:
    """The positions of the inputs that the program writes to, ascending; `signature` is that of its functional form."""
    user = list(signature.user_inputs)
    return tuple(sorted({user.index(name) for name in signature.user_inputs_to_mutate.values()}))


def state_buffers(signature: ExportGraphSignature) -> tuple[str, ...]:
    """The names of the buffers that the program writes to, sorted; `signature` is that of its functional form."""
    return tuple(sorted(set(signature.buffers_to_mutate.values())))


def refuse_written(findings: Sequence[Finding], recorder: str, placed: int) -> None:
    """Raises Refused for a program that writes to an input or a buffer where a build cannot keep that: the recorder `trace`, and a
    program of which `placed` operations run on the host beside a GPU."""
    found = next((finding for finding in findings if finding.rule in WRITES), None)
    if found is None or not (placed or recorder == "trace"):
        return
    why = (
        "this is not supported beside operations on the host" if placed
        else "this is recorded by the capture recorder alone, which needs the GPU"
    )  # fmt: skip
    fixes = {"mutated-input": CLONE, "mutated-buffer": RETURN, "random-operation": INSTEAD}
    raise ModelError("check-refused", f"{found.where or 'model'}: {found.rule}: {found.message}: {why}", fixes[found.rule])


def refuse(findings: Sequence[Finding], strict: bool, waive: Sequence[str]) -> None:
    """Raises Refused for the findings that stop a build: those of severity refuse and, when `strict`, those of severity host."""
    known = names()
    for name in waive:
        if name not in known:
            raise ModelError("check-refused", f"waive {name!r}: no such rule (rules: {', '.join(sorted(known))})")
    stopping = [f for f in findings if f.severity == REFUSE or (strict and f.severity == HOST)]
    for finding in stopping:
        if finding.rule in waive:
            raise ModelError(
                "check-refused", f"waive {finding.rule!r}: this refusal cannot be waived: {finding.effect}", finding.fix
            )
        raise ModelError("check-refused", told(finding, len(stopping) - 1), finding.fix)


def told(finding: Finding, more: int = 0) -> str:
    """A finding as one line, and how many more there are."""
    rest = f" (and {more} more finding{'s' if more > 1 else ''})" if more else ""
    return f"{finding.where or 'model'}: {finding.rule}: {finding.message}: {finding.effect}{rest}"
