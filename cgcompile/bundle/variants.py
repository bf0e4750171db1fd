"""Joins several bundles of one model, for different GPUs or CPU levels, into one bundle with a variant for each.

The variants share weights, exported programs, and the inputs and expected outputs of the self-test.  Other files are in folders
with the variant's name: `graphs/sm_90/`, `host/x86-64-v3/`.  Kernel images are named by their hashes, and variants share them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from cgbundle.errors import BundleError
from cgbundle.format import archive, file_names, safetensors_files
from cgbundle.format.archive import Archive
from cgbundle.format.safetensors_files import Mapped
from cgbundle.format.schema import Manifest, SelfTest, Weight
from cgbundle.format.variants import variant_name
from cgbundle.validate import bundle as verify
from cgbundle.validate import host_code

from ..errors import BuildError
from . import manifest_text

APART = (file_names.GRAPHS, file_names.HOST)
"""Folders whose files belong to a single variant."""

EXPLAINED = "kernels.json"
"""File for users: the configuration of each kernel of a variant."""


def join_variants(folders: Sequence[Path], out: Path) -> tuple[Manifest, ...]:
    """Writes the bundles in `folders` as variants of one bundle in `out`, an empty folder.  Returns their manifests in order.
    Raises variants-differ if weights or expected outputs differ between bundles."""
    manifests = [archive.read_manifest(str(folder)) for folder in folders]
    with ExitStack() as stack:
        files = [_Files(stack, folder) for folder in folders]
        stored, names = _shared_weights(manifests, files)
        for name, tensors in stored.items():
            if tensors:
                with open(out / name, "wb") as file:
                    safetensors_files.write(file, tensors)
        _write_self_test(manifests, files, out)
        variants = [
            _moved(_ordered(_renamed(manifest, renamed), manifests[0]), folder, out)
            for manifest, renamed, folder in zip(manifests, names, folders, strict=True)
        ]
    for path in sorted(folders[0].glob("**/*.pt2")):
        _copy(path, out / path.relative_to(folders[0]))
    for variant in variants:
        host_code.attach(out, variant)
    return _sealed(variants, out)


class _Files:
    """The memory-mapped safetensors files of one bundle, by name.  A missing file has no tensors."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.mapped: dict[str, Mapped] = {}
        for name in (file_names.WEIGHTS, file_names.TABLES, file_names.SELF_TEST):
            if (folder / name).exists():
                mapped = self.mapped[name] = Mapped(str(folder / name), name)
                stack.callback(mapped.close)

    def tensor(self, file: str, name: str) -> safetensors_files.Tensor:
        mapped = self.mapped[file]
        row = mapped.entries[name]
        return row.dtype, row.shape, partial(mapped.data, name)

    def names(self, file: str) -> list[str]:
        return list(self.mapped[file].entries) if file in self.mapped else []


def _shared_weights(
    manifests: Sequence[Manifest], files: Sequence[_Files]
) -> tuple[dict[str, dict[str, safetensors_files.Tensor]], list[dict[str, str]]]:
    """Returns the tensors by shared file, and for each variant the new names of weights that differ between variants.  Only tables
    and constants of the build may differ.  A weight that an update can change must be equal in all variants."""
    stored: dict[str, dict[str, safetensors_files.Tensor]] = {file_names.WEIGHTS: {}, file_names.TABLES: {}}
    renamed: list[dict[str, str]] = []
    for manifest, variant_files in zip(manifests, files, strict=True):
        frozen = {manifest.weights[row.weight].tensor for row in manifest.frozen if row.reason == "constant"}
        names: dict[str, str] = {}
        for file, shared in stored.items():
            for name in variant_files.names(file):
                tensor = variant_files.tensor(file, name)
                if name not in shared or _same(shared[name], tensor):
                    shared.setdefault(name, tensor)
                    continue
                if name not in frozen:
                    raise BuildError(
                        "variants-differ",
                        f"weight {name!r} has other values for {variant_name(manifest.target)} than for "
                        f"{variant_name(manifests[0].target)}: model() is called once for each variant",
                        "let model() give the same weights every time: load them from a file, or seed what draws them",
                    )
                names[name] = f"{variant_name(manifest.target)}.{name}"
                shared[names[name]] = tensor
        renamed.append(names)
    return stored, renamed


def _same(one: safetensors_files.Tensor, other: safetensors_files.Tensor) -> bool:
    return one[:2] == other[:2] and memoryview(one[2]()) == memoryview(other[2]())


def _write_self_test(manifests: Sequence[Manifest], files: Sequence[_Files], out: Path) -> None:
    """Writes the self-test of the first variant.  Raises variants-differ if another variant's differs."""
    positions = [_new_positions(manifest, manifests[0]) for manifest in manifests]
    first = _numbered(files[0], positions[0])
    for manifest, variant_files, variant_positions in zip(manifests[1:], files[1:], positions[1:], strict=True):
        tensors = _numbered(variant_files, variant_positions)
        other = next((name for name in first if name not in tensors or not _same(first[name], tensors[name])), None)
        if other is not None or first.keys() != tensors.keys():
            what = f"other values of {other}" if other in tensors else "other tensors"
            raise BuildError(
                "variants-differ",
                f"the self-test of {variant_name(manifest.target)} has {what} than that of {variant_name(manifests[0].target)}: "
                "the results were recorded on a GPU, or other equally good indices were selected",
                f"build {variant_name(manifest.target)} as a bundle of its own, or with --record cross-compile",
            )
    with open(out / file_names.SELF_TEST, "wb") as file:
        safetensors_files.write(file, first)


def _numbered(files: _Files, positions: Mapping[int, int]) -> dict[str, safetensors_files.Tensor]:
    """Returns the tensors of a self-test.  Their names have the new positions of the weights that are state."""
    tensors = {}
    for name in files.names(file_names.SELF_TEST):
        before, kind, last = name.rsplit("/", 2)
        index, dot, part = last.partition(".")  # `0.hashes` for a condensed tensor
        number = positions[int(index)] if kind in ("state", "state-at") else int(index)
        tensors[f"{before}/{kind}/{number}{dot}{part}"] = files.tensor(file_names.SELF_TEST, name)
    return tensors


def _new_positions(manifest: Manifest, first: Manifest) -> dict[int, int]:
    """Maps the old position of each weight to its new one.  State comes first, in an order that all variants share, because the
    self-test refers to state by position."""
    state = [row.name for row in first.weights if row.memory == "state"]
    order = sorted(
        range(len(manifest.weights)),
        key=lambda at: (state.index(manifest.weights[at].name) if manifest.weights[at].memory == "state" else len(state), at),
    )
    return {old: new for new, old in enumerate(order)}


def _ordered(manifest: Manifest, first: Manifest) -> Manifest:
    """Returns the manifest with its weights, and all references to them, in the new order."""
    positions = _new_positions(manifest, first)
    state = [index for index, row in enumerate(manifest.weights) if row.memory == "state"]  # a self-test compares them last
    state_order = [state.index(old) for old in positions if old in state]
    weights: list[Weight] = [manifest.weights[old] for old in positions]
    entries = [
        replace(
            entry,
            mutated_buffers=tuple(sorted([positions[index] for index in entry.mutated_buffers])),
            aliases=tuple(
                [
                    replace(alias, index=positions[alias.index]) if alias.memory in ("weights", "state") else alias
                    for alias in entry.aliases
                ]
            ),
            self_test=_reordered(entry.self_test, state_order),
        )
        for entry in manifest.entries
    ]
    regions = [
        replace(region, constants=tuple([(name, positions[index]) for name, index in region.constants]))
        for region in manifest.regions
    ]
    frozen = sorted([replace(row, weight=positions[row.weight]) for row in manifest.frozen], key=lambda row: row.weight)
    random = None if manifest.random is None else positions[manifest.random]
    return replace(
        manifest, weights=tuple(weights), entries=tuple(entries), regions=tuple(regions), frozen=tuple(frozen), random=random
    )


def _reordered(test: SelfTest, state_order: Sequence[int]) -> SelfTest:
    """Returns the self-test with the bounds and errors of state in the new order."""

    def order(numbers: tuple[float, ...]) -> tuple[float, ...]:
        begin = len(numbers) - len(state_order)
        return (*numbers[:begin], *[numbers[begin + old] for old in state_order]) if numbers else ()

    proofs = tuple([replace(proof, errors=order(proof.errors)) for proof in test.proofs])
    return replace(test, bounds=order(test.bounds), proofs=proofs)


def _renamed(manifest: Manifest, names: Mapping[str, str]) -> Manifest:
    weights = [
        replace(
            row, name=names.get(row.name, row.name) if row.tensor in names else row.name, tensor=names.get(row.tensor, row.tensor)
        )
        for row in manifest.weights
    ]
    return replace(manifest, weights=tuple(weights))


def _moved(manifest: Manifest, folder: Path, out: Path) -> Manifest:
    """Copies the images and the files of the variant to `out`.  Returns the manifest with the new paths."""
    name = variant_name(manifest.target)
    paths = {
        file.path: _variant_path(file.path, name) for file in manifest.files if file.path.startswith((*APART, file_names.KERNELS))
    }
    for path, place in paths.items():
        _copy(folder / path, out / place)
    if (folder / EXPLAINED).exists():
        _copy(folder / EXPLAINED, out / file_names.GRAPHS / name / EXPLAINED)
    entries = [
        replace(
            entry,
            programs=tuple(
                [
                    replace(program, steps=tuple([replace(step, file=paths.get(step.file, "")) for step in program.steps]))
                    for program in entry.programs
                ]
            ),
        )
        for entry in manifest.entries
    ]
    regions = [replace(region, file=paths.get(region.file, "")) for region in manifest.regions]
    state = paths.get(manifest.module_state, "")
    return replace(manifest, entries=tuple(entries), regions=tuple(regions), module_state=state)


def _variant_path(path: str, name: str) -> str:
    folder, _, subpath = path.partition("/")
    return path if f"{folder}/" == file_names.KERNELS else f"{folder}/{name}/{subpath}"


def _copy(file: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        shutil.copyfile(file, place)


def _sealed(variants: Sequence[Manifest], out: Path) -> tuple[Manifest, ...]:
    """Writes the manifests of the variants with all files of `out`, and checks the bundle.  Raises bundle-refused."""
    first, rows = variants[0], manifest_text.describe_files(str(out))
    options = dict(first.provenance.options) | {"target": ",".join([variant_name(variant.target) for variant in variants])}
    origin = replace(first.provenance, options=tuple(options.items()))
    sealed = tuple([replace(variant, name=first.name, provenance=origin, files=rows) for variant in variants])
    (out / file_names.MANIFEST).write_bytes(manifest_text.encode(*sealed))
    bundle = Archive(str(out))
    try:
        verify.check_bundle(bundle, "full")
    except BundleError as error:
        raise BuildError("bundle-refused", f"the bundle that was built: {error}") from None
    finally:
        bundle.close()
    return sealed
