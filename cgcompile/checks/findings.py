"""Collects the findings of all programs, and stops a build."""

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
"""Rules that do not apply if everything runs on the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The findings in the order of RULES, and mappings by int_key.  `placements`: the nodes that must run on the host in a bundle
    for a GPU, with the reasons.  `functionalized`: the signature of the program's functional form."""

    findings: tuple[Finding, ...]
    placements: Mapping[IntKey, Mapping[str, str]]
    functionalized: Mapping[IntKey, ExportGraphSignature]

    @property
    def on_host(self) -> int:
        """The largest number of operations of an int_key that must run on the host."""
        return max(len(placed) for placed in self.placements.values())


def check(
    exported: Exported,
    target: str = "cuda",
    fallback_ops: Sequence[str] = (),
    *,
    conditionals: bool = False,
    cross_compiled: bool = False,
) -> Checked:
    """Applies all rules to all programs.

    `target` is "cuda" or "cpu".  On the cpu target everything is one host region, so findings of severity host are omitted.
    `conditionals`: the recorder creates conditional nodes.  `cross_compiled`: no GPU captures the program.  `fallback_ops` are
    operators that the user keeps on the host: `aten.topk`, `mylib::op` or `mylib.op.default`.

    Raises fallback-op-unknown for an operator that no program calls, and export-failed for a program that torch cannot
    functionalize.
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
    """The fields of `Checked`, for one program."""

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
        cpu_findings = tuple([finding for finding in program_findings if finding.severity != HOST and finding.rule not in GPU_ONLY])
        cpu_findings += tuple(operators_without_code(program))
        return _CheckedProgram(findings=cpu_findings, placements={}, functionalized=functionalized)
    placed = placements(program.graph, program_findings, context.data_dependent, context.moved)
    program_findings = with_moved_draws(with_moved_control_flow(program_findings, placed), placed, program)
    program_findings += tuple(operators_without_code(program, placed)) if placed else ()
    return _CheckedProgram(findings=program_findings, placements=placed, functionalized=functionalized)


def merged_findings(per_key: Mapping[IntKey, tuple[Finding, ...]], sizes: Mapping[str, tuple[int, ...]]) -> tuple[Finding, ...]:
    """Merges the findings of several programs.  If only some programs have a finding, its message names their int_keys.  Names of
    nodes differ between programs.  So two findings are the same if rule, message and source line are equal."""
    if len(per_key) == 1:
        return next(iter(per_key.values()))
    same: dict[tuple[str, str, str, str], dict[IntKey, list[Finding]]] = {}
    for key, findings in reversed(list(per_key.items())):  # the largest int_key first, because a report shows its regions
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
    """Returns `batch=1, seq=32; batch=8, seq=32`, for at most three int_keys."""
    key_texts = [", ".join([f"{name}={size}" for name, size in zip(sizes, key, strict=True)]) for key in keys[:3]]
    return "; ".join(key_texts) + (f", and {len(keys) - 3} more" if len(keys) > 3 else "")


def refuse(checked: Checked, strict: bool, allow: Sequence[str], specialize: str) -> None:
    """Raises check-refused for a finding of severity refuse, with `strict` also for one of severity host, and with
    specialize="shared" for any operation on the host.  `allow` cannot permit such a finding: the error says so."""
    refuse_findings(checked.findings, strict, allow)
    count = checked.on_host
    if count and specialize == "shared":
        raise ModelError(
            "check-refused",
            f"specialize='shared': {count} operations run on the host, and their regions are lowered for every size",
            "leave --specialize out",
        )


def refuse_findings(findings: Sequence[Finding], strict: bool, allow: Sequence[str]) -> None:
    """Raises check-refused for a finding of severity refuse, with `strict` also for one of severity host."""
    stopping = [f for f in findings if f.severity == REFUSE or (strict and f.severity == HOST)]
    if not stopping:
        return
    first, n_more = stopping[0], len(stopping) - 1
    if first.rule in allow:
        raise ModelError("check-refused", f"allow {first.rule!r}: this refusal cannot be allowed: {first.effect}", first.fix)
    tail = f" (and {n_more} more finding{'s' if n_more > 1 else ''})" if n_more else ""
    raise ModelError("check-refused", f"{first.where or 'model'}: {first.rule}: {first.message}: {first.effect}{tail}", first.fix)
