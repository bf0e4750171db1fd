"""All findings of a program, and those that stop a build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.export import ExportedProgram, ExportGraphSignature

from cgbundle.format.schema import Finding, IntKey

from ..errors import ModelError
from ..export.exported import Exported
from ..export.functionalization import functional
from ..export.weights import weight_placeholders
from .context import HOST, REFUSE, RuleContext
from .control import with_moved_control_flow
from .host_placement import data_dependent_nodes, moved_nodes, placements
from .operators import check_fallback_ops, operators_without_code
from .randomness import with_moved_draws
from .rules import RULES

GPU_ONLY = frozenset({"several-devices", "pinned-memory"})
"""Rules that mean nothing where everything is on the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """`findings` in the order of the rules.

    By int_key: `placements`, the nodes of its program that must be on the host beside a GPU, with the reasons; `functionalized`,
    the signature of its program's functional form.
    """

    findings: tuple[Finding, ...]
    placements: Mapping[IntKey, Mapping[str, str]]
    functionalized: Mapping[IntKey, ExportGraphSignature]

    @property
    def on_host(self) -> int:
        """The number of operations that must be on the host, at the int_key where they are most."""
        return max(len(placed) for placed in self.placements.values())


def check(
    exported: Exported,
    target: str = "cuda",
    fallback_ops: Sequence[str] = (),
    *,
    conditionals: bool = False,
    cross_compiled: bool = False,
) -> Checked:
    """All findings of all rules, over all programs.

    `target`: "cuda" or "cpu".  The cpu target is one host region: what severity host means for a GPU does not exist there.
    `conditionals`: the recorder makes conditional nodes.  `cross_compiled`: no GPU captures it.
    `fallback_ops`: operators that the user keeps on the host, as `aten.topk`,
    `mylib::op` or `mylib.op.default`.
    Raises fallback-op-unknown for one that the program does not call, and export-failed for a program that torch cannot make
    functional.
    """
    check_fallback_ops([program for _, program in exported.programs.distinct], fallback_ops)
    checked_programs = {
        key: _check_program(exported, program, target, fallback_ops, conditionals, cross_compiled)
        for key, program in exported.programs.distinct
    }
    merged = merged_findings({key: checked.findings for key, checked in checked_programs.items()}, exported.sizes)
    by_program = {id(exported.programs.at(key)): checked for key, checked in checked_programs.items()}
    by_key = {key: by_program[id(program)] for key, program in exported.programs.by_key.items()}
    return Checked(
        findings=merged,
        placements={key: checked.placements for key, checked in by_key.items()},
        functionalized={key: checked.functionalized for key, checked in by_key.items()},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _CheckedProgram:
    """What Checked says, of one program."""

    findings: tuple[Finding, ...]
    placements: Mapping[str, str]
    functionalized: ExportGraphSignature


def _check_program(
    exported: Exported, program: ExportedProgram, target: str, fallback_ops: Sequence[str], conditionals: bool, cross_compiled: bool
) -> _CheckedProgram:
    functionalized = functional(program)
    context = RuleContext(
        exported=exported,
        program=program,
        functionalized=functionalized,
        target=target,
        conditionals=conditionals,
        cross_compiled=cross_compiled,
        fallback_ops=tuple(fallback_ops),
        moved=moved_nodes(program.graph, frozenset(weight_placeholders(program))),
        data_dependent=data_dependent_nodes(program.graph),
    )
    program_findings = tuple([finding for rule in RULES for finding in rule(context)])
    if target == "cpu":
        kept = tuple([finding for finding in program_findings if finding.severity != HOST and finding.rule not in GPU_ONLY])
        kept += tuple(operators_without_code(program))
        return _CheckedProgram(findings=kept, placements={}, functionalized=functionalized)
    placed = placements(program.graph, program_findings, context.data_dependent, context.moved)
    program_findings = with_moved_draws(with_moved_control_flow(program_findings, placed), placed, program)
    program_findings += tuple(operators_without_code(program, placed)) if placed else ()
    return _CheckedProgram(findings=program_findings, placements=placed, functionalized=functionalized)


def merged_findings(per_key: Mapping[IntKey, tuple[Finding, ...]], sizes: Mapping[str, tuple[int, ...]]) -> tuple[Finding, ...]:
    """The findings of several programs, each once, by their int_keys; one that not all programs have says where it holds.

    The same operation has other names in other programs: what is compared is the rule, its message and the user's line.
    """
    if len(per_key) == 1:
        return next(iter(per_key.values()))
    same: dict[tuple[str, str, str, str], dict[IntKey, list[Finding]]] = {}
    for key, findings in reversed(list(per_key.items())):  # of the largest int_key, whose regions a report shows
        for finding in findings:
            same.setdefault((finding.rule, finding.message, finding.where, finding.source), {}).setdefault(key, []).append(finding)
    order = {rule: place for place, rule in enumerate(rule.__name__ for rule in RULES)}
    merged = []
    for by_key in same.values():
        first = next(iter(by_key.values()))[0]
        if len(by_key) < len(per_key):
            first = replace(first, message=f"{first.message} (at {_keys_text(list(reversed(by_key)), sizes)})")
        merged.append(first)
    return tuple(sorted(merged, key=lambda row: order.get(row.rule.replace("-", "_"), len(order))))


def _keys_text(keys: Sequence[IntKey], sizes: Mapping[str, tuple[int, ...]]) -> str:
    """`batch=1, seq=32; batch=8, seq=32`, of three keys at most."""
    said = [", ".join([f"{name}={size}" for name, size in zip(sizes, key, strict=True)]) for key in keys[:3]]
    return "; ".join(said) + (f", and {len(keys) - 3} more" if len(keys) > 3 else "")


def refuse(checked: Checked, strict: bool, allow: Sequence[str], specialize: str) -> None:
    """Raises `refused` for what stops a build.

    That is: findings of severity refuse, and of severity host when `strict`; rules in `allow` that cannot be allowed; operations on
    the host beside specialize="shared".
    """
    _refuse_findings(checked.findings, strict, allow)
    count = checked.on_host
    if count and specialize == "shared":
        raise ModelError(
            "check-refused",
            f"specialize='shared': {count} operations run on the host, and their regions are lowered for every size",
            "leave --specialize out",
        )


def _refuse_findings(findings: Sequence[Finding], strict: bool, allow: Sequence[str]) -> None:
    stopping = [f for f in findings if f.severity == REFUSE or (strict and f.severity == HOST)]
    if not stopping:
        return
    first, more = stopping[0], len(stopping) - 1
    if first.rule in allow:
        raise ModelError("check-refused", f"allow {first.rule!r}: this refusal cannot be allowed: {first.effect}", first.fix)
    rest = f" (and {more} more finding{'s' if more > 1 else ''})" if more else ""
    raise ModelError("check-refused", f"{first.where or 'model'}: {first.rule}: {first.message}: {first.effect}{rest}", first.fix)
