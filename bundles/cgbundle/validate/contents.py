"""Checks of the files beside the manifest: weights, recordings, host code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import Struct, error

from ..errors import BundleError
from ..format import file_names
from ..format.archive import Archive
from ..format.safetensors import Entry
from ..format.schema import File, Weight
from ..format.shapes import graph_memories, memory_order
from . import require
from .manifest import check_manifest

LEVELS = ("load", "full")  # what is hashed: all but the data of the weights, or everything
LARGE = (file_names.WEIGHTS, file_names.TABLES)  # hashed by `full` only


def check_loaded(bundle: Archive, *, full: bool = False, tables: bool = True) -> None:
    """Checks the manifest, the files of its variant, and their contents. `full`: all files and hashes. `tables`: also recordings.
    Raises manifest-invalid, file-damaged, weights-invalid or table-invalid for the first invariant that does not hold."""
    manifest = bundle.manifest
    check_manifest(manifest)
    files: Sequence[File] = manifest.files
    if not full and len(bundle.variants) > 1:  # those of this variant; kernel images are hashed when they are loaded
        paths = file_names.recordings(manifest) | {region.file for region in manifest.regions}
        paths |= {manifest.module_state, file_names.SELF_TEST}
        paths |= {*file_names.weight_files(manifest), *file_names.program_files(manifest)}
        files = [file for file in files if file.path in paths]
    for file in files:
        later = file.path in LARGE or file.path.startswith(file_names.RANKS)
        bundle.check_hash(file) if full or not later else bundle.check_size(file)
    check_weights(bundle)
    check_host_code(bundle)
    if tables and manifest.target.kind == "cuda":
        check_tables(bundle)


def check_weights(bundle: Archive) -> None:
    """Raises weights-invalid unless the files of weights and tables have exactly the tensors of the manifest."""
    for name, weights in file_names.weight_files(bundle.manifest).items():
        _check_tensors(name, bundle.tensors(name), weights, alone=len(bundle.variants) == 1)


def _check_tensors(file: str, entries: Mapping[str, Entry], weights: Sequence[Weight], *, alone: bool) -> None:
    """`alone`: no other variant reads the file, so it has no other tensors."""
    for weight in weights:
        entry = entries.get(weight.tensor)
        if entry is None:
            raise BundleError("weights-invalid", f"{file}: tensor {weight.tensor!r} is missing")
        stored = [weight.shape[axis] for axis in memory_order(weight.shape, weight.strides)]
        actual, moved = list(entry.shape), [[size for size in shape if size != 1] for shape in (entry.shape, stored)]
        if entry.dtype != weight.dtype or sorted(actual) != sorted(stored) or moved[0] != moved[1]:
            text = f"tensor {weight.tensor!r} is {entry.dtype} {actual}, expected {weight.dtype} {stored}"
            raise BundleError("weights-invalid", f"{file}: {text}")
    for name in sorted(entries.keys() - {weight.tensor for weight in weights}) if alone else ():
        raise BundleError("weights-invalid", f"{file}: tensor {name!r} is no weight's")


def check_tables(bundle: Archive) -> None:
    """Raises table-invalid unless recordings and module states are valid, and each recording has its program's int_key."""
    from ..format.table import Table  # a cpu bundle has no tables
    from .programs import check_overwrites, check_targets, writable
    from .recordings import PEER, check_recording

    manifest = bundle.manifest
    if manifest.engine is not None:
        from .engine import check_engine_tables  # few bundles are of an engine's graphs

        return check_engine_tables(bundle)
    memories, images = graph_memories(manifest.memories), file_names.kernel_images(manifest)
    for entry in manifest.entries:
        for program in entry.programs:
            allowed = writable(manifest, entry, program)
            for place, step in enumerate(program.steps):
                if step.kind != "graph":
                    continue
                table = Table(bundle.data(step.file), step.file)
                check_recording(table, memories, images)
                if PEER in bytes(table.relocation_memory):
                    from .special_kernels import exchanges  # few models are over several devices

                    exchanges(table, manifest.world)
                if manifest.donated:
                    from .state import check_untouched, donated_by_others  # few models have donations

                    check_untouched(table, donated_by_others(manifest, entry.name))
                if tuple(table.key) != program.key:
                    text = f"key: {tuple(table.key)}, the manifest uses it for {program.key}"
                    raise BundleError("table-invalid", f"{step.file}: {text}")
                if manifest.state_dimensions:
                    from .state import check_rows_of_recording  # few models have any

                    check_rows_of_recording(manifest, table)
                check_targets(table, allowed)
                check_overwrites(program, place, table)
    if not manifest.module_state:
        return
    from .module_state import states, targets  # few bundles have any

    memories_of_states = targets(states(bundle))
    if manifest.donations and "inputs" in memories_of_states:
        text = "a variable points at memory inputs, and donations give calls inputs that lie elsewhere"
        raise BundleError("table-invalid", f"{manifest.module_state}: {text}")
    if manifest.state_dimensions and "state" in memories_of_states:
        text = "a variable points at memory state, whose rows a load counts"
        raise BundleError("table-invalid", f"{manifest.module_state}: {text}")


def check_host_code(bundle: Archive) -> None:
    for index, region in enumerate(bundle.manifest.regions):
        if region.file:
            from . import host_code  # no bundle of graphs alone needs it

            actual, expected = host_code.read(bundle.data(region.file)), host_code.described(bundle.manifest, index)
            where = f"regions[{index}].file"
            require(actual is not None, where, f"{region.file} does not say what it was built for")
            if actual != expected:
                field = host_code.difference(actual or b"", expected)
                require(False, where, f"{region.file} was compiled for a manifest with other {field or 'rows'}")


# --- ELF files -----------------------------------------------------------------------------------------------------------


MAGIC = b"\x7fELF\2\1"  # a little-endian ELF file of 64 bits
HEADER = Struct("<16x2H4x3Q4x6H")
"""Type, machine; entry, program headers, section headers; sizes and numbers of header, program and section headers."""

SEGMENT = Struct("<I4xQ16xQ16x")  # type, offset, bytes in the file
SECTION = Struct("<4xI16xQQ24x")  # type, offset, bytes
NO_BITS = 8  # type of a section without bytes in the file
SHARED_OBJECT = 3  # type of an ELF file that the dynamic loader loads


def check_elf(data: bytes, where: str, kind: int | None = None) -> None:
    """Raises image-invalid unless the file is complete and of type `kind`. The CUDA driver gets images without a length, and both
    it and the dynamic loader would read past the end of a truncated file. (System V ABI, chapter 4.)"""
    try:
        e_type, _, _, segments, sections, _, segment_size, segment_count, section_size, section_count, _ = HEADER.unpack_from(data)
        if not data.startswith(MAGIC) or kind not in (None, e_type):
            text = "not a shared object" if kind == SHARED_OBJECT else "not an ELF file of 64 bits"
            raise BundleError("image-invalid", f"{where}: {text}")
        ends = []
        for index in range(segment_count):
            _, offset, size = SEGMENT.unpack_from(data, segments + index * segment_size)
            ends.append(offset + size)
        for index in range(section_count):
            section, offset, size = SECTION.unpack_from(data, sections + index * section_size)
            ends.append(offset + (0 if section == NO_BITS else size))
    except (error, OverflowError):
        raise BundleError("image-invalid", f"{where}: cut off: its headers do not fit into its {len(data)} bytes") from None
    if ends and max(ends) > len(data):
        raise BundleError("image-invalid", f"{where}: cut off: its headers name byte {max(ends)}, it has {len(data)}")
