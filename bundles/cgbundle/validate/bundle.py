"""A bundle as a whole: `check_manifest` is pure; `check_bundle` adds the files, their hashes as far as asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from ..errors import BundleError, CgbundleError
from ..format import file_names, limits
from ..format.archive import Archive
from ..format.entries import FORWARD, all_programs
from ..format.records import replace
from ..format.schema import EntrySpec, File, Manifest
from ..format.variants import check_variants, named_variant, variant_name
from . import host_code
from .contents import check_host_code, check_tables, check_weights
from .memories import check_computed, check_memories, check_weight_rows, check_world
from .programs import check_programs, check_size_evaluations
from .require import require
from .self_test import check_self_test, check_self_test_rows
from .signature import check_signature
from .state import check_alias_spans, check_aliases, check_changes, check_donations, check_frozen, check_state

LEVELS = ("load", "full")
"""How much `check_bundle` hashes: everything but the weights' data, or everything."""

CPU, CUDA = "cpu", "cuda"

LARGE = (file_names.WEIGHTS, file_names.TABLES)
"""What only `full` hashes."""


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
    manifest = bundle.manifest
    check_manifest(manifest)
    several = len(bundle.variants) > 1 and level != "full"
    for file in _own_files(manifest) if several else manifest.files:
        later = file.path in LARGE or file.path.startswith(file_names.RANKS)
        bundle.check_hash(file) if level == "full" or not later else bundle.check_size(file)
    check_weights(bundle)
    check_host_code(bundle)
    if level == "full":
        check_self_test(bundle)
        _check_variants(bundle)
    if manifest.target.kind == CUDA:
        check_tables(bundle)
    if level == "full":
        for error in bundle.strays():
            raise error
    if manifest.world and not manifest.world.rank and level == "full":
        _check_all_ranks(bundle)


def _own_files(manifest: Manifest) -> list[File]:
    """The files of one variant of several, but for its kernel images, whose hashes are checked when they are loaded."""
    own = {step.file for program in all_programs(manifest) for step in program.steps} | {region.file for region in manifest.regions}
    own |= {manifest.module_state, file_names.SELF_TEST, *file_names.weight_files(manifest), *file_names.program_files(manifest)}
    return [file for file in manifest.files if file.path in own]


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
                if manifest.target.kind == CUDA:
                    check_tables(bundle)
    finally:
        bundle.choose(chosen)


def check_ranks(bundle: Archive, level: str = "load") -> list[Archive]:
    """The bundles of a bundle's ranks other than 0, opened and checked as it is.  Raises as `check_bundle`, and manifest-invalid or
    table-invalid for a rank that is called otherwise than rank 0, or exchanges other data."""
    found: list[Archive] = []
    try:
        for number in range(1, bundle.manifest.world.size if bundle.manifest.world else 1):
            found.append(check_rank(bundle, number, level))
    except BundleError:
        for each in found:
            each.close()
        raise
    return found


def check_rank(bundle: Archive, number: int, level: str = "load") -> Archive:
    """One of them."""
    made = bundle.rank(number)
    try:
        with _inside(file_names.rank_folder(number)):
            check_bundle(made, level)
            _check_alike(made.manifest, bundle.manifest, number)
            _check_exchanges(made, bundle)
    except BundleError:
        made.close()
        raise
    return made


def _check_all_ranks(bundle: Archive) -> None:
    for each in check_ranks(bundle, "full"):
        each.close()


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

    made = []
    for each in (bundle, first):
        world = each.manifest.world
        files = [[step.file for step in program.steps if step.file] for program in all_programs(each.manifest)]
        made.append([[one for file in own for one in exchanges(Table(each.data(file), file), world)] for own in files])
    for program, own, others in zip(all_programs(bundle.manifest), *made, strict=True):
        if own != others:
            alike = [one == other for one, other in zip(own, others, strict=False)]
            place = alike.index(False) if False in alike else len(alike)
            text = f"int_key {program.key}: {len(own)} exchanges, rank 0 has {len(others)}; they part at number {place}"
            raise BundleError("table-invalid", text)


def examine(bundle: Archive) -> list[CgbundleError]:
    """Everything that is wrong with a bundle, file by file; [] when `check_bundle` with level "full" holds.

    Raises format-unsupported, and manifest-invalid where the manifest cannot be read.
    """
    manifest = bundle.manifest
    found: dict[str, CgbundleError] = {}

    def holds(check: Callable[..., None], *arguments: object) -> bool:
        try:
            check(*arguments)
        except BundleError as error:
            found.setdefault(str(error), error)
            return False
        return True

    if not holds(check_manifest, manifest):
        return list(found.values())
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
    if not found and manifest.world and not manifest.world.rank:
        holds(_check_all_ranks, bundle)
    if not found:
        holds(_check_variants, bundle)
    return [*found.values(), *bundle.strays()]


def check_manifest(manifest: Manifest) -> None:
    """Raises manifest-invalid unless the manifest is sound in itself, file-damaged when it does not list a file that it needs."""
    _check_entries(manifest)
    _of_entries(check_signature, manifest.entries)
    _check_target(manifest)
    check_memories(manifest)
    check_world(manifest)
    check_weight_rows(manifest)
    _check_regions(manifest)
    check_state(manifest)
    check_frozen(manifest)
    check_computed(manifest)
    _of_entries(partial(_check_calls, manifest), manifest.entries)
    check_donations(manifest)
    _check_owners(manifest)
    _check_files(manifest)
    _of_entries(partial(check_self_test_rows, manifest), manifest.entries)


def _of_entries(check: Callable[[EntrySpec], None], entries: Sequence[EntrySpec]) -> None:
    """A check of every entry; errors name its field of the manifest."""
    for index, entry in enumerate(entries):
        try:
            check(entry)
        except BundleError as error:
            raise BundleError(error.code, f"entries[{index}].{error}", error.hint) from None


def _check_calls(manifest: Manifest, entry: EntrySpec) -> None:
    check_changes(manifest, entry)
    check_aliases(manifest, entry)
    check_programs(manifest, entry)
    check_alias_spans(manifest, entry)


def _check_entries(manifest: Manifest) -> None:
    """Every entry has a name of its own.  One that is called `forward` is the first."""
    names = [entry.name for entry in manifest.entries]
    require(1 <= len(names) <= limits.ENTRIES, "entries", f"{len(names)}, expected 1 to {limits.ENTRIES}")
    for index, name in enumerate(names):
        where = f"entries[{index}].name"
        require(name.isidentifier(), where, f"{name!r} is no name")
        require(name not in names[:index], where, f"{name!r} stands twice")
        require(name != FORWARD or not index, where, f"{FORWARD!r} is not the first entry")
    check_size_evaluations(manifest.entries)


def _check_owners(manifest: Manifest) -> None:
    """A shared object, and the graphs of a recording, are one entry's: they say how they are called."""
    owners: dict[int, str] = {}
    for entry in manifest.entries:
        for region in host_code.host_regions(entry):
            taken = owners.setdefault(region, entry.name)
            require(taken == entry.name, f"regions[{region}]", f"is of two entries, {taken!r} and {entry.name!r}")


def _check_target(manifest: Manifest) -> None:
    require(bool(manifest.target.arch), "target.arch", "empty")
    require(not manifest.target.level or manifest.target.kind == CPU, "target.level", "a bundle for a GPU has none")
    hosted = any(region.kind == "host" for region in manifest.regions)
    beside = hosted and manifest.target.kind == CUDA
    require(bool(manifest.target.torch) or not beside, "target.torch", "empty: host regions beside a GPU run on torch's libraries")


def _check_regions(manifest: Manifest) -> None:
    for index, region in enumerate(manifest.regions):
        where = f"regions[{index}]"
        require((region.kind == "host") == bool(region.file), f"{where}.file", "a host region has a file, a graph region none")
        require(
            region.kind == "graph" or region.file.startswith(file_names.HOST),
            f"{where}.file",
            f"a shared object outside {file_names.HOST}",
        )
        for place, (_, weight) in enumerate(region.constants):
            require(0 <= weight < len(manifest.weights), f"{where}.constants[{place}]", f"no weight {weight}")
        require(len({name for name, _ in region.constants}) == len(region.constants), f"{where}.constants", "a name stands twice")
    files = [region.file for region in manifest.regions if region.file]
    require(len(set(files)) == len(files), "regions", "two of them have one shared object")


def _check_files(manifest: Manifest) -> None:
    paths = [file.path for file in manifest.files]
    require(len(set(paths)) == len(paths), "files", "a path stands twice")
    for index, file in enumerate(manifest.files):
        where = f"files[{index}]"
        parts = file.path.split("/")
        plain = file.path.isprintable() and "\\" not in file.path
        plain = plain and all(part not in ("", ".", "..") and len(part.encode()) <= limits.PATH_PART for part in parts)
        own = file.path in (file_names.MANIFEST, file_names.SIGNATURE)
        require(plain and not own, f"{where}.path", f"{file.path[:60]!r} is no path inside the bundle")
        if file.path.startswith(file_names.KERNELS):
            require(file.path == file_names.KERNELS + file.sha256, f"{where}.path", "a kernel image is not named by its SHA-256")
    within = {folder for path in paths for folder in file_names.folders(path)}
    both = sorted(within.intersection((*paths, file_names.MANIFEST, file_names.SIGNATURE)))
    require(not both, "files", f"{''.join(both[:1])!r} is a file and a folder")
    files = {step.file for program in all_programs(manifest) for step in program.steps}
    tables = files | {manifest.module_state}
    for index, file in enumerate(manifest.files):
        small = file.bytes <= limits.TABLE_BYTES or file.path not in tables
        require(small, f"files[{index}].bytes", f"a table of {file.bytes} bytes, more than the limit of {limits.TABLE_BYTES}")
    needed = {*file_names.weight_files(manifest), file_names.SELF_TEST, *file_names.program_files(manifest)}
    needed |= {region.file for region in manifest.regions if region.file}
    needed |= tables - {""}
    for path in sorted(needed - set(paths)):
        raise BundleError("file-damaged", f"{path}: the manifest needs it and does not list it")
