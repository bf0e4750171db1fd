"""`cgcompile inspect`: what a bundle is, from its manifest alone; nothing is loaded and nothing runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import listed, record, shortened, show, size, table, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from cgbundle.schema import Finding, Manifest, Program, Step

    Field = tuple[str, RenderableType | Sequence[str]]


def inspect(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="The bundle's directory.", show_default=False)],
    graph: Annotated[str | None, typer.Option("--graph", metavar="KEY", help="Show the steps of one int_key: 8, or 8x128.")] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Show the kernels by number of launches and image size.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what a bundle holds.

    Signature, target, sizes, memory, files, findings and proof, from the manifest alone: `cgcompile verify` checks the other files.
    """
    from cgbundle import archive, verify

    from . import keys, summary

    manifest = archive.read_manifest(bundle)
    verify.check_manifest(manifest)
    if kernels:
        _kernels(bundle, manifest, as_json)
    elif graph is not None:
        key = keys.parse(manifest, graph)
        program = next(each for each in manifest.programs if each.key == key)
        if as_json:
            write_json(next(each for each in summary.plain(bundle, manifest)["manifest"]["programs"] if tuple(each["key"]) == key))
        else:
            show(record(_program(manifest, program)))
    elif as_json:
        write_json(summary.plain(bundle, manifest))
    else:
        show(record(_overview(bundle, manifest)))


def _kernels(path: str, manifest: Manifest, as_json: bool) -> None:
    from .kernels import kernels, shown

    rows = kernels(path, manifest)
    if as_json:
        write_json([row._asdict() for row in rows])
    elif rows:
        show(shown(rows))
    else:
        show(record([("kernels", "none: this bundle has no recorded graphs")]))


def _overview(path: str, manifest: Manifest) -> list[Field]:
    from . import summary

    origin = manifest.provenance
    fields: list[Field] = [
        ("bundle", f"{manifest.name}, format {manifest.format}, {summary.bulk(manifest)}"),
        ("target", summary.target(manifest.target)),
        ("signature", summary.signature(manifest)),
        ("sizes", summary.sizes(manifest)),
    ]
    if manifest.dimensions:
        fields.append(("padding", [summary.padding(dimension) for dimension in manifest.dimensions]))
    fields += [
        ("memory", summary.memory(manifest)),
        ("weights", summary.weights(manifest)),
        ("regions", _regions(manifest)),
        ("programs", summary.programs(manifest)),
        ("files", summary.files(manifest)),
        ("findings", _findings(manifest.findings, manifest.waivers)),
        *([("waived", ", ".join(manifest.waivers))] if manifest.waivers else []),
        ("built", f"{origin.created} from {origin.source}"),
        ("with", ", ".join([f"{name} {version}" for name, version in origin.versions])),
        ("on", origin.machine),
        ("options", ", ".join([f"{name}={value}" for name, value in origin.options]) or "none"),
        ("load", summary.load_lines(path, manifest)),
    ]
    return fields


def _regions(manifest: Manifest) -> RenderableType:
    rows = [(region.kind, region.name, region.file, region.reason) for region in manifest.regions]
    shown, hidden = shortened(rows)
    return table(("", "", "", ""), [*shown, *([("", f"and {hidden} more", "", "")] if hidden else [])])


def _findings(findings: Sequence[Finding], waivers: Sequence[str]) -> list[str]:
    if not (findings or waivers):
        return ["none, nothing was waived"]
    shown, hidden = shortened(findings)
    lines = []
    for finding in shown:
        lines.append(f"{finding.severity} {finding.rule}: {finding.message}" + (f" ({finding.where})" if finding.where else ""))
        lines += [f"  {name}: {text}" for name, text in (("effect", finding.effect), ("fix", finding.fix)) if text]
    return [*lines, *([f"and {hidden} more"] if hidden else [])] or ["none"]


# --- one program --------------------------------------------------------------------------------------------------


def _program(manifest: Manifest, program: Program) -> list[Field]:
    from cgbundle.exam import name_key

    fields: list[Field] = [
        ("int_key", name_key(manifest, program.key)),
        ("memory", f"arena {size(program.arena)}, inputs {size(program.static)}"),
        ("steps", table((">", "", "region", "reads", "writes", "file"), _steps(manifest, program))),
        ("values", table((">", "", "", "strides", "memory", ">offset", ""), _values(manifest, program))),
    ]
    for index, step in enumerate(program.steps):
        if step.kind == "graph":
            fields.append((f"step {index}", nodes(manifest, step)))
    return fields


def _steps(manifest: Manifest, program: Program) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for index, step in enumerate(program.steps):
        name, file = "", ""
        if step.kind != "copy":
            region = manifest.regions[step.region]
            name, file = region.name, step.file or region.file
        reads, writes = (listed([f"v{value}" for value in values], 4) for values in (step.inputs, step.outputs))
        rows.append((index, step.kind, name, reads, writes, file))
    return rows


def _values(manifest: Manifest, program: Program) -> list[tuple[Any, ...]]:
    roles: dict[int, str] = {}
    for kind, positions, specs in (("input", program.inputs, manifest.inputs), ("output", program.outputs, manifest.outputs)):
        for position, spec in zip(positions, specs, strict=True):
            roles[position] = f"{roles[position]}, {kind} {spec.name}" if position in roles else f"{kind} {spec.name}"
    return [
        (f"v{index}", value.dtype, list(value.shape), list(value.strides), value.memory, value.offset, roles.get(index, ""))
        for index, value in enumerate(program.values)
    ]


def nodes(manifest: Manifest, step: Step) -> RenderableType:
    """What a graph step launches: the place where the node list of its recording (`cgbundle.tables`) will be shown."""
    bytes_of = {file.path: file.bytes for file in manifest.files}
    return f"{step.file}: {size(bytes_of[step.file])}"
