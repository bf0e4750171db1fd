"""The stage check: applies the rules to the entries of a model, and prepares them for lowering.  Reports share its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cgbundle.format.schema import Dimension, Finding

from ..checks import Checked, check, refuse
from ..checks.findings import merged_findings, refuse_findings
from ..checks.repeatability import widened_bound
from ..errors import BuildError
from ..export.exported import Exported, Signature
from ..targets.architectures import arch
from ..targets.choice import CONDITIONALS, Chosen, Options
from ..transforms.prepared import Prepared, prepare, together


def checked_entries(
    exported: Sequence[Exported], signatures: Sequence[Signature], chosen: Chosen, options: Options
) -> Sequence[Prepared]:
    """Returns the entries of a model that can be built.  Raises check-refused, and the errors of `check`, `prepare`, `together`."""
    checked = [apply_rules(entry, chosen.recorder, options) for entry in exported]
    for rules in checked:
        refuse(rules, options.strict, options.allow, options.specialize)
    entries = [prepared_entry(*parts) for parts in zip(exported, signatures, checked, strict=True)]
    entries = [with_later_findings(entry, chosen.target, chosen.recorder) for entry in together(entries)]
    for entry in entries:
        refuse_findings(entry.findings, options.strict, options.allow)
    return entries


def apply_rules(exported: Exported, recorder: str, options: Options) -> Checked:
    """Applies the rules for a recorder to an entry."""
    kind = "cpu" if recorder == "host" else "cuda"
    conditionals, crossed = recorder in CONDITIONALS, recorder == "cross-compile"
    return check(exported, kind, options.fallback_ops, conditionals=conditionals, cross_compiled=crossed)


def prepared_entry(exported: Exported, signature: Signature, checked: Checked) -> Prepared:
    """Prepares an entry for lowering, and adds the results of the rules."""
    prepared = prepare(exported, signature, checked.functionalized, markers=bool(checked.on_host))
    return replace(prepared, findings=checked.findings, placements=checked.placements)


def with_later_findings(entry: Prepared, target: str, recorder: str) -> Prepared:
    """Adds the findings of rules that need a prepared entry."""
    missing = operators_without_kernel(entry, target) if recorder == "cross-compile" else ()
    return replace(entry, findings=(*entry.findings, *widened_bound(entry), *missing))


def operators_without_kernel(entry: Prepared, target: str) -> tuple[Finding, ...]:
    """Returns the findings of the rule "operator-without-kernel" for `target`, a cross-compiled architecture.

    Returns () in a process that sees a GPU, where it cannot check.  The build's workers report such an operation later.
    """
    if torch.cuda.device_count():
        return ()
    from ..offline.lower import coverage  # late: Inductor's tables take seconds to import, and only cross-compiling needs them

    by_key = {
        key: coverage.operators_without_kernel(program, entry.placements.get(key, {}), arch(target))
        for key, program in entry.programs.distinct
    }
    return merged_findings(by_key, entry.sizes)


# --- the ranks of a model over several devices ------------------------------------------------------------------------

PADS = ("no", "zeros", "rows")
"""From the least to the most padding that a dimension allows."""


def agreed(by_rank: Sequence[Sequence[Dimension]]) -> tuple[Dimension, ...]:
    """Returns dimensions that are valid for all ranks, from those that each rank has proved.  All ranks get the same sizes."""
    dimensions = []
    for versions in zip(*by_rank, strict=True):
        least = min(versions, key=lambda dimension: (PADS.index(dimension.pad), dimension.chunk))
        dimensions.append(least)
    return tuple(dimensions)


def refuse_host(entries: Sequence[Prepared]) -> None:
    """Raises world-refused for operations that would run on the host."""
    for entry in entries:
        first = next((finding for finding in entry.findings if finding.severity == "host"), None)
        if first is not None or any(entry.placements.values()):
            where = f"{first.where or 'model'}: {first.rule}: {first.message}" if first else "an operation runs on the host"
            raise BuildError("world-refused", where, first.fix if first else "")
