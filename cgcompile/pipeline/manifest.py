"""Makes the manifest of a build, without its list of files, from the results of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cgbundle.format.schema import VERSION, EntrySpec, Finding, Manifest, Provenance, StateDimension

from ..bundle.proof import mismatches
from ..model.flat_module import PREFIX
from ..model.source import ROWS, StateRows
from ..targets.build_spec import BuildSpec, ManifestParts
from ..transforms.output_aliases import manifest_aliases


def manifest_of(spec: BuildSpec, parts: ManifestParts, findings: Sequence[tuple[Finding, ...]], origin: Provenance) -> Manifest:
    """Returns the manifest.  `findings`: those of each entry."""
    names = [row.name for row in parts.weights]
    generator = next((entry.prepared.generator for entry in spec.entries if entry.prepared.generator), "")
    entries = [
        EntrySpec(
            name=entry.name,
            dimensions=entry.dimensions,
            inputs=entry.prepared.signature.inputs,
            mutated_inputs=entry.prepared.written,
            mutated_buffers=tuple(sorted([names.index(name.removeprefix(PREFIX)) for name in entry.prepared.changes])),
            outputs=entry.prepared.signature.outputs,
            aliases=manifest_aliases(entry.prepared.aliases, parts.weights),
            data_sizes=entry.prepared.signature.data_sizes,
            call=entry.prepared.signature.call,
            parameters=entry.prepared.signature.parameters,
            result=entry.prepared.signature.result,
            programs=entry_parts.programs,
            findings=entry_findings,
            self_test=entry_parts.self_test,
        )
        for entry, entry_parts, entry_findings in zip(spec.entries, parts.entries, findings, strict=True)
    ]
    return Manifest(
        version=VERSION,
        name=spec.entries[0].source.name,
        target=parts.target,
        entries=tuple(entries),
        weights=parts.weights,
        random=names.index(generator.removeprefix(PREFIX)) if generator else None,
        frozen=parts.frozen,
        memories=parts.memories,
        state_dimensions=tuple([_dimension(row, names) for row in spec.entries[0].source.rows]),
        regions=parts.regions,
        module_state=parts.module_state,
        donations=spec.donations,
        donated=parts.donated,
        allowed=tuple(sorted(spec.allow)),
        world=parts.world,
        provenance=origin,
        files=(),
    )


def _dimension(rows: StateRows, names: Sequence[str]) -> StateDimension:
    count = ROWS + rows.name
    return StateDimension(
        name=rows.name, weights=tuple(sorted(map(names.index, rows.buffers))), most=rows.most,
        count=names.index(count) if count in names else None,
    )  # fmt: skip


def with_mismatches(manifest: Manifest) -> Manifest:
    """Adds findings for accepted differences."""
    entries = [replace(entry, findings=(*entry.findings, *mismatches(manifest, entry))) for entry in manifest.entries]
    return replace(manifest, entries=tuple(entries))
