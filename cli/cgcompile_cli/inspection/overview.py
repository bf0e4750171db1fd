"""`inspect` without an option: a bundle's manifest, field by field.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cgbundle.format.entries import each_entry
from cgbundle.weights.update import SINCE, updatable

from .. import summary
from ..output import count, first_rows, listed, shortened, table
from . import program_rows

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cgbundle.format.schema import Finding, Manifest

    from ..output import Field


NAMED = 6
"""Weights of a kind that are named before the rest is counted."""

TELLING = {
    "folded": "folded, the code holds values that the build computed from it; for other ones build again",
    "baked": "Python read its value at {where} while the bundle was built; for other ones build again",
    "constant": "a constant of the model, which no state_dict holds",
    "state": "state, which calls change; `program.state` writes it",
}
"""Why a weight cannot be updated, in words."""


def overview(path: str, manifest: Manifest) -> list[Field]:
    """What `inspect` shows of a bundle: its manifest, field by field."""
    origin, each = manifest.provenance, each_entry(manifest)
    several = len(each) > 1
    fields: list[Field] = [
        ("bundle", f"{manifest.name}, format {manifest.format}, {summary.bulk(manifest)}"),
        ("target", summary.target(manifest.target)),
        *([("world", summary.world(manifest))] if manifest.world else []),
    ]
    for one in each:
        fields += [("entry", [one.entry, *summary.changes(one)])] if several else []
        fields += [
            ("signature", table(("", "", "", "", ""), summary.signature_rows(one))),
            ("sizes", [summary.sizes(one), *summary.axes(one)]),
        ]
        if one.dimensions:
            fields.append(("padding", [summary.padding(dimension) for dimension in one.dimensions]))
    fields += [
        ("memory", summary.memory(manifest)),
        ("weights", summary.weights(manifest)),
        ("update", update(manifest)),
        *([("state", summary.state(manifest))] if summary.state(manifest) else []),
        *([("chains", summary.chain_lines(manifest))] if manifest.chains else []),
        ("regions", _regions(manifest)),
    ]
    for one in each:
        of = f" {one.entry}" if several else ""
        fields.append((f"programs{of}", program_rows.programs(one)))
        fields += program_rows.lowering_fields(one, of)
        if rows := program_rows.exam_rows(one):
            fields.append((f"exam{of}", table(("", ">error", ">bound"), rows)))
    findings = list(dict.fromkeys([finding for one in each for finding in one.findings]))
    fields += [
        ("files", summary.files(manifest)),
        ("findings", _findings(findings, manifest.waivers)),
        *([("waived", ", ".join(manifest.waivers))] if manifest.waivers else []),
        ("signed", summary.signed(path)),
        ("built", f"{origin.created} from {origin.source}"),
        ("with", ", ".join([f"{name} {version}" for name, version in origin.versions])),
        ("on", origin.machine),
        ("options", ", ".join([f"{name}={value}" for name, value in origin.options]) or "none"),
        ("load", summary.load_lines(path, manifest)),
    ]
    return fields


def update(manifest: Manifest) -> list[str]:
    """Which weights `program.update` replaces, and the others by the reason."""
    if manifest.world:
        return ["refused: each GPU has weights of its own; build the bundle again with other ones"]
    if manifest.format < SINCE:
        return [f"refused: format {manifest.format} does not say what the code holds of the weights"]
    names, fixed = updatable(manifest)
    tables = [name for name in fixed if name.startswith(summary.TABLE)]
    kept = {name: reason for name, reason in fixed.items() if name not in tables}
    places = {manifest.weights[row.weight].tensor: row.where for row in manifest.fixed}
    where = {row.name: places.get(row.tensor, "") for row in manifest.weights}
    told = {name: TELLING.get(reason, reason).format(where=where[name]) for name, reason in kept.items()}
    reasons = {text: [name for name, own in told.items() if own == text] for text in dict.fromkeys(told.values())}
    return [
        f"{len(names)} of {count(len(manifest.weights) - len(tables), 'weight')}",
        *[f"not {listed(own, NAMED)}: {text}" for text, own in sorted(reasons.items(), key=lambda row: kept[row[1][0]])],
        *([f"{count(len(tables), 'table')} that the build computed: what was folded, or what kernels look up"] if tables else []),
    ]


def _regions(manifest: Manifest) -> RenderableType:
    rows = [(region.kind, region.name, region.file, region.reason) for region in manifest.regions]
    return table(("", "", "", ""), first_rows(rows, 1))


def _findings(findings: Sequence[Finding], waivers: Sequence[str]) -> list[str]:
    if not (findings or waivers):
        return ["none, nothing was waived"]
    shown, hidden = shortened(findings)
    lines = []
    for finding in shown:
        lines.append(f"{finding.severity} {finding.rule}: {finding.message}" + (f" ({finding.where})" if finding.where else ""))
        lines += [f"  {name}: {text}" for name, text in (("effect", finding.effect), ("fix", finding.fix)) if text]
    return [*lines, *([f"and {hidden} more"] if hidden else [])] or ["none"]
