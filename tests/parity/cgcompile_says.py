"""cgcompile's verdict on a case: the findings of cgcompile.checks and the operations that run on the host because of them, or the
error with which export refuses the model."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch

from cgbundle.format.schema import Finding
from cgcompile.checks import check
from cgcompile.errors import BuildError
from cgcompile.export.export import export
from cgcompile.model.devices.markers import TO_DEVICE
from cgcompile.model.load import load_source
from cgcompile.model.user_code import place

from .case import SIZES, Case
from .settings import settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`rules` has the names of all rules with findings, or with operations that run on the host because of other findings, and the
    code of an export error. `flagged`: something is refused or runs on the host. `lines`: the user's lines, "file.py:line", of
    those operations and of copies back to the GPU. `error`: the message of an export error, or ""."""

    rules: frozenset[str]
    flagged: bool
    lines: frozenset[str]
    findings: tuple[Finding, ...]
    error: str


def cgcompile_says(case: Case) -> Verdict:
    """Returns what `cgcompile check` reports for `case` with the cuda target."""
    model, inputs = case.make()
    source = load_source(model, inputs)
    with settings(case.deterministic):
        torch.manual_seed(0)
        try:
            exported = export(source, dict.fromkeys(source.dimensions, SIZES))
        except BuildError as error:
            return _refused(error)
        checked = check(exported, target="cuda", fallback_ops=case.fallback_ops, conditionals=True)
        findings, moved = checked.findings, next(iter(checked.placements.values()))
        nodes = [node for node in exported.programs.first.graph.nodes if node.name in moved or (moved and node.target is TO_DEVICE)]
    reported = [finding for finding in findings if finding.severity != "note"]
    return Verdict(
        rules=frozenset([*[finding.rule for finding in findings], *moved.values()]),
        flagged=bool(reported or moved),
        lines=frozenset([short(where) for where in [*[f.where for f in reported], *[place(n)[0] for n in nodes]] if where]),
        findings=findings,
        error="",
    )


def _refused(error: BuildError) -> Verdict:
    """Returns the verdict for an export error; `error.code` names its rule."""
    place_match = re.match(r"\S+\.py:\d+", str(error))
    lines = frozenset([short(place_match[0])] if place_match else [])
    return Verdict(rules=frozenset([error.code]), flagged=True, lines=lines, findings=(), error=str(error))


def short(where: str) -> str:
    """Returns file:line without the folder."""
    return os.path.basename(where)
