"""Checks of a whole bundle: `contents.check_loaded`, and all variants, ranks, the self-test's file, and unlisted files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from math import prod

from ..errors import BundleError, CgbundleError
from ..format import file_names
from ..format.archive import Archive
from ..format.file_names import all_programs
from ..format.records import replace
from ..format.safetensors import Entry
from ..format.schema import STATE, EntrySpec, IntKey, Manifest, Program
from ..format.variants import check_variants, named_variant, variant_name
from ..tensors import comparison
from . import require
from .contents import LARGE, check_host_code, check_loaded, check_tables, check_weights
from .manifest import check_manifest


def checked_manifest(path: str, variant: str | None = None) -> Manifest:
    """The checked manifest of the bundle at `path`, by default of its first variant. Raises as `archive.read_manifest`, and
    option-refused for an unknown variant."""
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
    """A file-damaged error for each file, link and folder that the manifest does not list, except its signature. Unknown folders
    are not entered."""
    named = {file_names.MANIFEST, file_names.SIGNATURE, *[file.path for file in bundle.manifest.files]}
    known = {*file_names.OWN_FOLDERS, *[folder for name in named for folder in file_names.folders(name)]}
    problems, waiting = [], [""]
    for folder in waiting:  # the loop appends to it
        with os.scandir(bundle.folder(folder)) as rows:
            for row in rows:
                name, is_folder = f"{folder}/{row.name}".removeprefix("/"), row.is_dir(follow_symlinks=False)
                if is_folder and name in known:
                    waiting.append(name)
                elif is_folder or name not in named:
                    problems.append(f"{name}: {'a folder of no named file' if is_folder else 'not named in the manifest'}")
    return [BundleError("file-damaged", text) for text in sorted(problems)]


def _check_variants(bundle: Archive) -> None:
    """Checks the manifests, tables and shared objects of the other variants, and that all variants agree."""
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
    """Opens and checks the bundles of ranks 1 and up. Raises as `check_bundle`, and manifest-invalid or table-invalid for a rank
    that does not match rank 0."""
    with ExitStack() as opened:
        ranks = range(1, bundle.manifest.world.size if bundle.manifest.world else 1)
        archives = [opened.enter_context(closing(check_rank(bundle, number, level))) for number in ranks]
        opened.pop_all()
    return archives


def check_rank(bundle: Archive, number: int, level: str = "load") -> Archive:
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
    for archive in check_ranks(bundle, "full"):
        archive.close()


@contextmanager
def _inside(part: str) -> Iterator[None]:
    try:
        yield
    except BundleError as error:
        raise BundleError(error.code, f"{part}: {error}", error.hint) from None


def _check_alike(manifest: Manifest, first: Manifest, number: int) -> None:
    """A rank has the signature, int_keys and memory peer of rank 0."""
    world = None if first.world is None else replace(first.world, rank=number)
    require(manifest.world == world, "world", f"{manifest.world}, rank 0 has {first.world}")
    require(manifest.target == first.target, "target", "is not rank 0's")
    names = [entry.name for entry in first.entries]
    require([entry.name for entry in manifest.entries] == names, "entries", "are not rank 0's")
    for one, other in zip(manifest.entries, first.entries, strict=True):
        for field in ("dimensions", "inputs", "outputs", "mutated_inputs"):  # equal dimensions have equal int_keys
            require(getattr(one, field) == getattr(other, field), field, f"of {one.name} differ from rank 0's")


def _check_exchanges(bundle: Archive, first: Archive) -> None:
    """At every int_key two ranks exchange the same data in the same order: a kernel waits for those of the other ranks."""
    from ..format.table import Table
    from .special_kernels import exchanges

    sides = []
    for archive in (bundle, first):
        world = archive.manifest.world
        files = [[step.file for step in program.steps if step.file] for program in all_programs(archive.manifest)]
        sides.append([[one for file in paths for one in exchanges(Table(archive.data(file), file), world)] for paths in files])
    for program, actual, others in zip(all_programs(bundle.manifest), *sides, strict=True):
        if actual != others:
            alike = [one == other for one, other in zip(actual, others, strict=False)]
            place = alike.index(False) if False in alike else len(alike)
            text = f"int_key {program.key}: {len(actual)} exchanges, rank 0 has {len(others)}; first difference at number {place}"
            raise BundleError("table-invalid", text)


def examine(bundle: Archive) -> list[CgbundleError]:
    """Every error of a bundle, file by file; [] if `check_bundle` with level "full" passes. Raises format-unsupported, and
    manifest-invalid if the manifest cannot be read."""
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


# --- the file of the self-test -------------------------------------------------------------------------------------------


def check_self_test(bundle: Archive) -> None:
    """Raises weights-invalid unless the file has exactly the inputs, outputs and changes of every int_key."""
    if bundle.manifest.engine is not None:
        return  # the process that saved it had the tensors: its graphs were verified there
    tensors, expected = _SelfTestTensors(bundle.tensors(file_names.SELF_TEST)), set[str]()
    for entry in bundle.manifest.entries:
        for program in entry.programs:
            expected |= tensors.of_state(bundle.manifest, entry, program.key) | tensors.of_values(entry, program)
    for name in sorted(tensors.entries.keys() - expected):
        raise _wrong(name, "belongs to no int_key")


def _wrong(name: str, text: str) -> BundleError:
    return BundleError("weights-invalid", f"{file_names.SELF_TEST}: tensor {name!r} {text}")


class _SelfTestTensors:
    """The tensors in the file of a self-test. Methods check some and return their names."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = entries

    def __getitem__(self, name: str) -> Entry:
        if name not in self.entries:
            raise _wrong(name, "is missing")
        return self.entries[name]

    def of_values(self, spec: EntrySpec, program: Program) -> set[str]:
        """Inputs and outputs of a program, and mutated inputs after the call."""
        mutated, names = [(index, program.inputs[index]) for index in spec.mutated_inputs], set[str]()
        for kind, positions in (("input", enumerate(program.inputs)), ("output", enumerate(program.outputs)), ("mutated", mutated)):
            for index, position in positions:
                name, value = file_names.self_test_entry(program.key, kind, index, spec.name), program.values[position]
                if kind != "input" and (endings := comparison.stand_in(self.entries, name)):
                    names |= self.condensed(name, endings, value.dtype, prod(value.shape))
                    continue
                names.add(name)
                entry = self[name]
                if (entry.dtype, entry.shape) != (value.dtype, value.shape):
                    raise _wrong(name, f"is {entry.dtype} {list(entry.shape)}, expected {value.dtype} {list(value.shape)}")
        return names

    def of_state(self, manifest: Manifest, spec: EntrySpec, key: IntKey) -> set[str]:
        """State after a call. `state-at`: pairs [first element, number of elements] of what changed, in memory order; `state`:
        these elements."""
        names = set[str]()
        for index, weight in enumerate(manifest.weights):
            for kind, dtype, rank in (("state", weight.dtype, 1), ("state-at", "int64", 2)) if weight.memory == STATE else ():
                name = file_names.self_test_entry(key, kind, index, spec.name)
                if kind == "state" and (endings := comparison.stand_in(self.entries, name)):
                    names |= self.condensed(name, endings, dtype, None)
                    continue
                names.add(name)
                entry = self[name]
                if entry.dtype != dtype or len(entry.shape) != rank or (rank == 2 and entry.shape[1] != 2):
                    raise _wrong(name, f"is {entry.dtype} {list(entry.shape)}")
        return names

    def condensed(self, name: str, endings: Sequence[str], dtype: str, count: int | None) -> set[str]:
        """The condensed form of a tensor of `count` elements (None: known only at a replay)."""
        for shapes in comparison.expected_shapes(name, dtype, count or 0):
            if shapes.keys() == {name + ending for ending in endings}:
                for part, (kind, shape) in shapes.items():
                    row = self[part]
                    fits = row.shape == shape if count is not None else (len(row.shape), row.shape[1:]) == (len(shape), shape[1:])
                    if row.dtype != kind or not fits:
                        raise _wrong(part, f"is {row.dtype} {list(row.shape)}")
                return set(shapes)
        raise BundleError("weights-invalid", f"{file_names.SELF_TEST}: tensor {name!r}: a part of its condensed form is missing")
