"""`inspect` without an option: a bundle's manifest, field by field.  Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cgbundle.call.update import updatable

from .. import summary
from ..output import count, first_rows, listed, shortened, table
from . import program_rows

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cgbundle.format.schema import Finding, Manifest

    from ..output import Field


NAMED = 6
"""Maximum weights of a kind that are listed."""

FROZEN_REASONS = {
    "folded": "folded, the code holds values that the build computed from it; for other values, build again",
    "baked": "Python read its value at {where} while the bundle was built; for other values, build again",
    "constant": "a constant of the model, which no state_dict holds",
    "state": "state, which calls change; `program.state` writes it",
}
"""Texts for the reasons why a weight cannot be updated."""


def overview(path: str, manifest: Manifest) -> list[Field]:
    """Returns the fields that `inspect` shows."""
    origin, many = manifest.provenance, len(manifest.entries) > 1
    fields: list[Field] = [
        ("bundle", f"{manifest.name}, format {manifest.version}, {summary.bulk(manifest)}"),
        ("target", summary.target(manifest.target)),
        *summary.variants(path, manifest),
        *([("world", summary.world(manifest))] if manifest.world else []),
    ]
    for entry in manifest.entries:
        fields += [("entry", summary.entry_lines(manifest, entry))] if many else []
        fields += [
            ("signature", table(("", "", "", "", ""), summary.signature_rows(manifest, entry))),
            ("sizes", [summary.sizes(manifest, entry), *summary.axes(entry)]),
        ]
        if entry.dimensions:
            fields.append(("padding", [summary.padding(dimension) for dimension in entry.dimensions]))
    fields += [
        ("memory", summary.memory_lines(manifest)),
        ("weights", summary.weights(manifest)),
        ("update", update(manifest)),
        *([("state", summary.state(manifest))] if summary.state(manifest) else []),
        *([("donations", summary.donation_lines(manifest))] if manifest.donations else []),
        ("regions", _regions(manifest)),
    ]
    for entry in manifest.entries:
        suffix = f" {entry.name}" if many else ""
        fields.append((f"programs{suffix}", program_rows.programs(entry)))
        fields += program_rows.lowering_fields(entry, suffix)
        if rows := program_rows.self_test_rows(manifest, entry):
            fields.append((f"self-test{suffix}", table(("", ">error", ">bound"), rows)))
    findings = list(dict.fromkeys([finding for entry in manifest.entries for finding in entry.findings]))
    fields += [
        ("files", summary.files(manifest)),
        ("findings", _findings(findings, manifest.allowed)),
        *([("allowed", ", ".join(manifest.allowed))] if manifest.allowed else []),
        ("signed", summary.signed(path)),
        ("built", f"{origin.created} from {origin.source}"),
        ("with", ", ".join([f"{name} {version}" for name, version in origin.versions])),
        ("on", origin.machine),
        ("options", ", ".join([f"{name}={value}" for name, value in origin.options]) or "none"),
        ("load", summary.load_lines(path, manifest)),
    ]
    return fields


def update(manifest: Manifest) -> list[str]:
    """Returns how many weights `program.update` can replace, and which it cannot replace, by reason."""
    if manifest.world:
        return ["refused: each GPU has weights of its own; build the bundle again with other ones"]
    names, frozen = updatable(manifest)
    tables = [name for name in frozen if name.startswith(summary.TABLE)]
    refused = {name: reason for name, reason in frozen.items() if name not in tables}
    places = {manifest.weights[row.weight].tensor: row.where for row in manifest.frozen}
    where = {row.name: places.get(row.tensor, "") for row in manifest.weights}
    texts = {name: FROZEN_REASONS.get(reason, reason).format(where=where[name]) for name, reason in refused.items()}
    reasons = {text: [name for name, reason in texts.items() if reason == text] for text in dict.fromkeys(texts.values())}
    return [
        f"{len(names)} of {count(len(manifest.weights) - len(tables), 'weight')}",
        *[f"not {listed(group, NAMED)}: {text}" for text, group in sorted(reasons.items(), key=lambda row: refused[row[1][0]])],
        *([f"{count(len(tables), 'table')} that the build computed: what was folded, or what kernels look up"] if tables else []),
    ]


def _regions(manifest: Manifest) -> RenderableType:
    rows = [(region.kind, region.name, region.file, region.reason) for region in manifest.regions]
    return table(("", "", "", ""), first_rows(rows, 1))


def _findings(findings: Sequence[Finding], allowed: Sequence[str]) -> list[str]:
    if not (findings or allowed):
        return ["none, nothing was allowed"]
    shown, hidden = shortened(findings)
    lines = []
    for finding in shown:
        lines.append(f"{finding.severity} {finding.rule}: {finding.message}" + (f" ({finding.where})" if finding.where else ""))
        lines += [f"  {name}: {text}" for name, text in (("effect", finding.effect), ("fix", finding.fix)) if text]
    return [*lines, *([f"and {hidden} more"] if hidden else [])] or ["none"]
