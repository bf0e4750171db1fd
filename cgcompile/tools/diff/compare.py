"""Compares two bundles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cgbundle.format import file_names

from . import contents, manifests, recordings
from .bundle_files import BundleFiles, module_states
from .differences import Difference

IGNORED_FIELDS = ("created", "source", "machine")
"""Fields of the provenance that are ignored: time, source and machine of the build."""

PARTS = (
    "bundle", "target", "signature", "sizes", "memory", "weights", "regions", "steps", "kernels", "nodes", "module state",
    "findings", "self-test", "versions", "options", "files",
)  # fmt: skip
"""The parts in the order of the report."""


def compare(a: BundleFiles, b: BundleFiles) -> tuple[Difference, ...]:
    """Returns all differences, sorted by part; () for two builds of the same model.

    If bundles have several variants, variants of the same name are compared.  A difference that all variants have is reported once.
    Files with equal SHA-256 in both manifests are not read; `cgcompile verify` checks them.  Raises file-damaged, table-invalid,
    weights-invalid for a damaged file.
    """
    if max(len(side.bundle.variants) for side in (a, b)) == 1:
        return _compare(a, b)
    sides = (a.variants, b.variants)
    common = [name for name in sides[0] if name in sides[1]]
    by_variant = {name: _compare(sides[0][name], sides[1][name]) for name in common}
    shared_rows = [row for row in by_variant[common[0]] if all(row in rows for rows in by_variant.values())] if common else []
    rows = [*manifests.variants(*map(list, sides)), *shared_rows]
    for name, variant_rows in by_variant.items():
        rows += [replace(row, name=" ".join(filter(None, [name, row.name]))) for row in variant_rows if row not in shared_rows]
    return tuple(sorted(rows, key=lambda row: PARTS.index(row.part)))


def _compare(a: BundleFiles, b: BundleFiles) -> tuple[Difference, ...]:
    """Compares one variant of each bundle."""
    rows = [*manifests.compare(a.manifest, b.manifest), *contents.weights(a, b), *contents.self_test(a, b)]
    same_recordings = recordings.same_tables(a, b)
    launched = [{} if same_recordings else recordings.launches(side) for side in (a, b)]
    rows += [*recordings.compare_kernels(*launched), *recordings.compare_nodes(a, b)]
    if _state_hash(a) != _state_hash(b):
        rows += recordings.compare_module_states(module_states(a), module_states(b))
    parts = {row.part for row in rows}
    ranks = set(_rank_differences(a, b))
    explained = {*_explained_files(a, launched[0], parts), *_explained_files(b, launched[1], parts)}
    if ranks:
        rows += ranks
        explained |= {path for side in (a, b) for path in side.files if path.startswith(file_names.RANKS)}
    rows += contents.files(a, b, explained)
    return tuple(sorted(rows, key=lambda row: PARTS.index(row.part)))


def _rank_differences(a: BundleFiles, b: BundleFiles) -> Iterator[Difference]:
    """Yields the differences of the ranks from 1 on that both bundles have: see `schema.World`."""
    sizes = [world.size if world and not world.rank else 1 for world in (a.manifest.world, b.manifest.world)]
    for number in range(1, min(sizes)):
        for row in compare(a.rank(number), b.rank(number)):
            yield replace(row, name=" ".join(filter(None, [f"rank {number}", row.name])))


def _state_hash(bundle: BundleFiles) -> str:
    return bundle.files[bundle.manifest.module_state].sha256 if bundle.manifest.module_state else ""


def _explained_files(bundle: BundleFiles, launched: recordings.Launches, parts: set[str]) -> Iterator[str]:
    """Yields files whose differences are not reported as rows, because differences of `parts` already explain them.

    All recordings are among them.  If two recordings differ without a reported difference, only bytes differ that no kernel reads.
    """
    yield from recordings.recording_files(bundle).values()
    yield from [f"kernels/{image}" for images in launched.values() for image in images]
    if "weights" in parts:
        yield from (file_names.WEIGHTS, file_names.TABLES)
    if parts & {"self-test", "sizes"}:
        yield file_names.SELF_TEST
    if parts & {"kernels", "module state"}:
        yield bundle.manifest.module_state
