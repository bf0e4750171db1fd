"""A whole bundle: beside what a load checks, all variants and ranks, the file of the self-test, and files that nothing names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import BundleError, CgbundleError
from ..format import file_names
from ..format.archive import Archive
from ..format.file_names import all_programs
from ..format.records import replace
from ..format.schema import Manifest
from ..format.variants import check_variants, named_variant, variant_name
from . import require
from .contents import LARGE, check_host_code, check_loaded, check_tables, check_weights
from .manifest import check_manifest
from .self_test import check_self_test


def checked_manifest(path: str, variant: str | None = None) -> Manifest:
    """The manifest of the bundle at `path`, by default its first variant's, every invariant of it checked.  Raises as
    `archive.read_manifest`, and option-refused for a variant that it lacks."""
    bundle = Archive(path)
    if variant is not None:
        bundle.choose(named_variant(bundle.variants.targets(), variant))
    check_manifest(bundle.manifest)
    return bundle.manifest


def check_bundle(bundle: Archive, level: str = "load") -> None:
    """Raises manifest-invalid, file-damaged, weights-invalid or table-invalid for the first invariant that does not hold."""
    check_loaded(bundle, full=level == "full")
    if level != "full":
        return
    manifest = bundle.manifest
    check_self_test(bundle)
    _check_variants(bundle)
    for error in strays(bundle):
        raise error
    if manifest.world and not manifest.world.rank:
        _check_all_ranks(bundle)


def strays(bundle: Archive) -> list[BundleError]:
    """A file-damaged for everything in the directory that the manifest does not name, links and folders too, but for its own
    signature.  A folder that no named file lies in is not looked into."""
    named = {file_names.MANIFEST, file_names.SIGNATURE, *[file.path for file in bundle.manifest.files]}
    known = {*file_names.OWN_FOLDERS, *[folder for name in named for folder in file_names.folders(name)]}
    problems, waiting = [], [""]
    for folder in waiting:  # grows while it is walked
        with os.scandir(bundle.folder(folder)) as rows:
            for row in rows:
                name = f"{folder}/{row.name}".removeprefix("/")
                is_folder = row.is_dir(follow_symlinks=False)
                if is_folder and name in known:
                    waiting.append(name)
                elif is_folder or name not in named:
                    problems.append(f"{name}: not named in the manifest" if not is_folder else f"{name}: a folder of no named file")
    return [BundleError("file-damaged", text) for text in sorted(problems)]


def _check_variants(bundle: Archive) -> None:
    """The variants beside the one that is chosen: their manifests, tables and shared objects; and that all fit together."""
    manifests = [bundle.variants.manifest(number) for number in range(len(bundle.variants))]
    if len(manifests) == 1:
        return
    chosen = manifests.index(bundle.manifest)
    check_variants(manifests)
    try:
        for number, manifest in enumerate(manifests):
            if number == chosen:
                continue
            bundle.choose(number)
            with _inside(f"variant {variant_name(manifest.target)}"):
                check_manifest(manifest)
                check_weights(bundle)
                check_host_code(bundle)
                if manifest.target.kind == "cuda":
                    check_tables(bundle)
    finally:
        bundle.choose(chosen)


def check_ranks(bundle: Archive, level: str = "load") -> list[Archive]:
    """The bundles of a bundle's ranks other than 0, opened and checked as it is.  Raises as `check_bundle`, and manifest-invalid or
    table-invalid for a rank that is called otherwise than rank 0, or exchanges other data."""
    rank_bundles: list[Archive] = []
    try:
        for number in range(1, bundle.manifest.world.size if bundle.manifest.world else 1):
            rank_bundles.append(check_rank(bundle, number, level))
    except BundleError:
        for rank_bundle in rank_bundles:
            rank_bundle.close()
        raise
    return rank_bundles


def check_rank(bundle: Archive, number: int, level: str = "load") -> Archive:
    """One of them."""
    rank_bundle = bundle.rank(number)
    try:
        with _inside(file_names.rank_folder(number)):
            check_bundle(rank_bundle, level)
            _check_alike(rank_bundle.manifest, bundle.manifest, number)
            _check_exchanges(rank_bundle, bundle)
    except BundleError:
        rank_bundle.close()
        raise
    return rank_bundle


def _check_all_ranks(bundle: Archive) -> None:
    for rank in check_ranks(bundle, "full"):
        rank.close()


@contextmanager
def _inside(part: str) -> Iterator[None]:
    """Errors name the part of the bundle."""
    try:
        yield
    except BundleError as error:
        raise BundleError(error.code, f"{part}: {error}", error.hint) from None


def _check_alike(manifest: Manifest, first: Manifest, number: int) -> None:
    """A rank is called as rank 0 is, with the same sizes, and they exchange data through one memory."""
    world = None if first.world is None else replace(first.world, rank=number)
    require(manifest.world == world, "world", f"{manifest.world}, rank 0 has {first.world}")
    require(manifest.target == first.target, "target", "is not rank 0's")
    names = [entry.name for entry in first.entries]
    require([entry.name for entry in manifest.entries] == names, "entries", "are not rank 0's")
    for one, other in zip(manifest.entries, first.entries, strict=True):
        for field in (
            "dimensions",
            "inputs",
            "outputs",
            "mutated_inputs",
        ):  # of equal dimensions, check_programs found equal int_keys
            require(getattr(one, field) == getattr(other, field), field, f"of {one.name} differ from rank 0's")


def _check_exchanges(bundle: Archive, first: Archive) -> None:
    """At every int_key two ranks exchange the same data in the same order: a kernel waits for its like on the other ones."""
    from ..tables.collectives import exchanges
    from ..tables.table import Table

    sides = []
    for archive in (bundle, first):
        world = archive.manifest.world
        files = [[step.file for step in program.steps if step.file] for program in all_programs(archive.manifest)]
        sides.append([[one for file in paths for one in exchanges(Table(archive.data(file), file), world)] for paths in files])
    for program, actual, others in zip(all_programs(bundle.manifest), *sides, strict=True):
        if actual != others:
            alike = [one == other for one, other in zip(actual, others, strict=False)]
            place = alike.index(False) if False in alike else len(alike)
            text = f"int_key {program.key}: {len(actual)} exchanges, rank 0 has {len(others)}; they part at number {place}"
            raise BundleError("table-invalid", text)


def examine(bundle: Archive) -> list[CgbundleError]:
    """Everything that is wrong with a bundle, file by file; [] when `check_bundle` with level "full" holds.

    Raises format-unsupported, and manifest-invalid where the manifest cannot be read.
    """
    manifest = bundle.manifest
    errors: dict[str, CgbundleError] = {}

    def holds(check: Callable[..., None], *arguments: object) -> bool:
        try:
            check(*arguments)
        except BundleError as error:
            errors.setdefault(str(error), error)
            return False
        return True

    if not holds(check_manifest, manifest):
        return list(errors.values())
    broken = set()
    for file in manifest.files:
        if not holds(bundle.check_hash, file):
            broken.add(file.path)
    for names, check in ((LARGE, check_weights), ((file_names.SELF_TEST,), check_self_test)):
        if not broken.intersection(names):
            holds(check, bundle)
    if not broken:
        holds(check_tables, bundle)
        holds(check_host_code, bundle)
    if not errors and manifest.world and not manifest.world.rank:
        holds(_check_all_ranks, bundle)
    if not errors:
        holds(_check_variants, bundle)
    return [*errors.values(), *strays(bundle)]
