"""The manifest of a build, but for its files: what the stages found, and the target's half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cgbundle.format.entries import each_entry, with_entries
from cgbundle.format.schema import Finding, Manifest, Provenance
from cgbundle.format.versions import FORMAT_VERSION

from ..bundle.proof import mismatches
from ..model.flat_module import PREFIX
from ..targets.build_spec import BuildSpec, ManifestParts
from ..transforms.output_aliases import manifest_aliases


def made_manifest(spec: BuildSpec, parts: ManifestParts, findings: Sequence[tuple[Finding, ...]], origin: Provenance) -> Manifest:
    """`findings` by entry."""
    names = [row.name for row in parts.weights]
    generator = next((entry.prepared.generator for entry in spec.entries if entry.prepared.generator), "")
    each = [
        Manifest(
            format=FORMAT_VERSION,
            name=entry.source.name,
            target=parts.target,
            entry=entry.name,
            dimensions=entry.dimensions,
            inputs=entry.prepared.signature.inputs,
            written=entry.prepared.written,
            changes=tuple(sorted([names.index(name.removeprefix(PREFIX)) for name in entry.prepared.changes])),
            outputs=entry.prepared.signature.outputs,
            aliases=manifest_aliases(entry.prepared.aliases, parts.weights),
            random=names.index(generator.removeprefix(PREFIX)) if generator else -1,
            call=entry.prepared.signature.call,
            parameters=entry.prepared.signature.parameters,
            result=entry.prepared.signature.result,
            weights=parts.weights,
            fixed=parts.fixed,
            tables=parts.tables,
            world=parts.world,
            memories=parts.memories,
            regions=parts.regions,
            programs=own.programs,
            module_state=parts.module_state,
            findings=found,
            waivers=tuple(sorted(spec.waive)),
            exam=own.exam,
            entries=(),
            chains=spec.chains,
            reserved=parts.reserved,
            provenance=origin,
            files=(),
            data_sizes=entry.prepared.signature.data_sizes,
        )
        for entry, own, found in zip(spec.entries, parts.entries, findings, strict=True)
    ]
    return with_entries(tuple(each))


def with_mismatches(manifest: Manifest) -> Manifest:
    """The manifest with a finding for what was accepted though it differs."""
    return with_entries(tuple([replace(each, findings=(*each.findings, *mismatches(each))) for each in each_entry(manifest)]))
