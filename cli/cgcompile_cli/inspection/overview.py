"""`inspect` without an option: a bundle's manifest, field by field.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import summary
from ..output import first_rows, shortened, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cgbundle.format.schema import Finding, Manifest

    from ..output import Field


def overview(path: str, manifest: Manifest) -> list[Field]:
    """What `inspect` shows of a bundle: its manifest, field by field."""
    origin = manifest.provenance
    fields: list[Field] = [
        ("bundle", f"{manifest.name}, format {manifest.format}, {summary.bulk(manifest)}"),
        ("target", summary.target(manifest.target)),
        ("signature", table(("", "", "", "", ""), summary.signature_rows(manifest))),
        ("sizes", [summary.sizes(manifest), *summary.axes(manifest)]),
    ]
    if manifest.dimensions:
        fields.append(("padding", [summary.padding(dimension) for dimension in manifest.dimensions]))
    fields += [
        ("memory", summary.memory(manifest)),
        ("weights", summary.weights(manifest)),
        *([("state", summary.state(manifest))] if summary.state(manifest) else []),
        ("regions", _regions(manifest)),
        ("programs", summary.programs(manifest)),
        *([("exam", table(("", ">error", ">bound"), summary.exam_rows(manifest)))] if summary.exam_rows(manifest) else []),
        ("files", summary.files(manifest)),
        ("findings", _findings(manifest.findings, manifest.waivers)),
        *([("waived", ", ".join(manifest.waivers))] if manifest.waivers else []),
        ("signed", summary.signed(path)),
        ("built", f"{origin.created} from {origin.source}"),
        ("with", ", ".join([f"{name} {version}" for name, version in origin.versions])),
        ("on", origin.machine),
        ("options", ", ".join([f"{name}={value}" for name, value in origin.options]) or "none"),
        ("load", summary.load_lines(path, manifest)),
    ]
    return fields


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
