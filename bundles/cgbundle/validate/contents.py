"""What the files of a bundle hold, beside its manifest: weights, recordings, host code.  And what a load checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import BundleError
from ..format import file_names
from ..format.archive import Archive
from ..format.safetensors import Entry
from ..format.schema import MEMORIES, File, Manifest, Weight
from ..format.spans import graph_memories, memory_order
from . import require
from .manifest import check_manifest

LEVELS = ("load", "full")
"""How much is hashed: everything but the weights' data, or everything."""

LARGE = (file_names.WEIGHTS, file_names.TABLES)
"""What only `full` hashes."""


def check_loaded(bundle: Archive, *, full: bool = False, tables: bool = True) -> None:
    """What a program is made of: the manifest, its variant's files, and what they hold.  `full`: all files, and all of their
    hashes.  `tables`: the recordings too.  Raises manifest-invalid, file-damaged, weights-invalid or table-invalid for the first
    invariant that does not hold."""
    manifest = bundle.manifest
    check_manifest(manifest)
    for file in manifest.files if full or len(bundle.variants) == 1 else _own_files(manifest):
        later = file.path in LARGE or file.path.startswith(file_names.RANKS)
        bundle.check_hash(file) if full or not later else bundle.check_size(file)
    check_weights(bundle)
    check_host_code(bundle)
    if tables and manifest.target.kind == "cuda":
        check_tables(bundle)


def _own_files(manifest: Manifest) -> list[File]:
    """The files of one variant of several, but for its kernel images, whose hashes are checked when they are loaded."""
    paths = file_names.recordings(manifest) | {region.file for region in manifest.regions}
    paths |= {manifest.module_state, file_names.SELF_TEST, *file_names.weight_files(manifest), *file_names.program_files(manifest)}
    return [file for file in manifest.files if file.path in paths]


def check_weights(bundle: Archive) -> None:
    """Raises weights-invalid unless the files of weights and tables are well formed and hold what the manifest names, and nothing
    else."""
    for name, weights in file_names.weight_files(bundle.manifest).items():
        _check_tensors(name, bundle.tensors(name), weights, alone=len(bundle.variants) == 1)


def _check_tensors(file: str, entries: Mapping[str, Entry], weights: Sequence[Weight], *, alone: bool) -> None:
    """`alone`: no other variant reads the file, so that every tensor is one of these weights'."""
    for weight in weights:
        entry = entries.get(weight.tensor)
        if entry is None:
            raise BundleError("weights-invalid", f"{file}: tensor {weight.tensor!r} is missing")
        actual = list(entry.shape)
        stored = [weight.shape[axis] for axis in memory_order(weight.shape, weight.strides)]
        same = sorted(actual) == sorted(stored) and _without_ones(actual) == _without_ones(stored)
        if entry.dtype != weight.dtype or not same:
            raise BundleError(
                "weights-invalid",
                f"{file}: tensor {weight.tensor!r} is {entry.dtype} {actual}, expected {weight.dtype} {stored}",
            )
    for name in sorted(entries.keys() - {weight.tensor for weight in weights}) if alone else ():
        raise BundleError("weights-invalid", f"{file}: tensor {name!r} is no weight's")


def check_tables(bundle: Archive) -> None:
    """Raises table-invalid unless every recording is sound and that of its program's key, and the module states are sound."""
    from ..tables.table import Table  # late: a cpu bundle has no tables
    from .lifetimes import check_overwrites, check_targets, check_untouched, donated_by_others, writable
    from .recordings import PEER, check_module_states, check_recording

    manifest = bundle.manifest
    if manifest.engine is not None:
        from .engine import check_engine_tables  # few bundles are of an engine's graphs

        return check_engine_tables(bundle)
    memories = graph_memories(manifest.memories)
    images = file_names.kernel_images(manifest)
    rows = [(entry, donated_by_others(manifest, entry.name), program) for entry in manifest.entries for program in entry.programs]
    for entry, donated, program in rows:
        allowed = writable(manifest, entry, program)
        for place, step in enumerate(program.steps):
            if step.kind != "graph":
                continue
            table = Table(bundle.data(step.file), step.file)
            check_recording(table, memories, images)
            if PEER in bytes(table.relocation_memory):
                from ..tables.collectives import exchanges  # few models are over several devices

                exchanges(table, manifest.world)
            if manifest.donated:
                check_untouched(table, donated)
            if tuple(table.key) != program.key:
                mismatch = f"key: {tuple(table.key)}, the manifest uses it for {program.key}"
                raise BundleError("table-invalid", f"{step.file}: {mismatch}")
            if manifest.state_dimensions:
                from .state import check_rows_of_recording  # few models have any

                check_rows_of_recording(manifest, table)
            check_targets(table, allowed)
            check_overwrites(program, place, table)
    if manifest.module_state:
        from ..tables.module_state import decode_states  # few bundles have any

        states = decode_states(bundle.data(manifest.module_state), manifest.module_state)
        check_module_states(states, manifest.module_state, memories, images)
        memory_of = {MEMORIES[row.target.memory] for state in states for row in state.relocations}
        inputs, moved = "inputs" in memory_of, "state" in memory_of and bool(manifest.state_dimensions)
        if manifest.donations and inputs:
            text = (
                f"{manifest.module_state}: a variable points at memory inputs, and donations give calls inputs that lie elsewhere"
            )
            raise BundleError("table-invalid", text)
        if moved:
            raise BundleError(
                "table-invalid", f"{manifest.module_state}: a variable points at memory state, whose rows a load counts"
            )


def check_host_code(bundle: Archive) -> None:
    """Raises manifest-invalid unless every shared object was built for the manifest's rows."""
    manifest = bundle.manifest
    for index, region in enumerate(manifest.regions):
        if region.file:
            from . import host_code  # no bundle of graphs alone needs it

            actual, expected = host_code.read(bundle.data(region.file)), host_code.described(manifest, index)
            where = f"regions[{index}].file"
            require(actual is not None, where, f"{region.file} does not say what it was built for")
            if actual != expected:
                field = host_code.difference(actual or b"", expected)
                require(False, where, f"{region.file} was built for other {field or 'rows'} than the manifest has")


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
