"""Keeps the cache files of Inductor and Triton for the next build, as one record in the content cache.

Both compilers find entries by a hash of everything that the compiled code depends on.  Weights are inputs of the compiled code.  So
the record's name is a hash of the programs without their weight values, and a build with other weights compiles nothing.  The
record also lists the int_keys that were lowered.  These need no `prime` process, so a build with one more size lowers only this
size."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..export.programs import Programs
from ..export.weights import weight_tensors
from ..targets.cuda.tensors import settings
from ..targets.program_contents import program_code, tensor_layout
from ..util.content_cache import cache_folder, cache_optional, cache_path, digest, recall, remember

STAGE = "captured"
"""Subfolder of the content cache."""

LARGEST = 1 << 29
"""Most bytes of files in one record; a larger cache is not kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledFile:
    """`path` is relative to the folder of the compilers' caches."""

    path: str
    content: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledFiles:
    """Cache files, and the int_keys (as text) that were lowered with them."""

    files: tuple[CompiledFile, ...]
    keys: tuple[str, ...]


def program_hash(programs: Programs, placements: Iterable[object]) -> str:
    """Returns a hash of the programs' code, the layouts (not the values) of their weights, and the placements."""
    distinct = {id(program): program for program in programs.by_key.values()}.values()
    parts = [
        (list(program_code(program)), [(name, tensor_layout(value)) for name, value in weight_tensors(program).items()])
        for program in distinct
    ]
    return digest(*parts, *placements)


def compiled_path(program: str, level: str, specialize: str) -> Path | None:
    """Returns the record's path for programs of this hash on this kind of GPU, or None if no cache can be used."""
    with cache_optional():
        gpu = torch.cuda.get_device_properties(0)
        machine = gpu.name, gpu.multi_processor_count, gpu.total_memory, torch.version.cuda
        return cache_path(cache_folder(), STAGE, program, level, specialize, machine, settings())
    return None


def recall_compiled(path: Path | None, folder: Path) -> frozenset[str]:
    """Writes the record's files into `folder`, without replacing any.  Returns the int_keys that were lowered, as texts."""
    record = recall(path, CompiledFiles) if path is not None else None
    if record is None:
        return frozenset()
    for file in record.files:
        destination = folder / file.path
        if not destination.exists():
            destination.parent.mkdir(parents=True, exist_ok=True)
            destination.write_bytes(file.content)
    return frozenset(record.keys)


def keep_compiled(path: Path | None, keys: Iterable[str], folder: Path) -> None:
    """Stores all files of `folder` and the int_keys that were lowered with them, unless the files exceed LARGEST bytes."""
    if path is None:
        return
    file_paths = sorted(file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    if sum(file.stat().st_size for file in file_paths) > LARGEST:
        return
    files = [CompiledFile(path=os.fspath(file.relative_to(folder)), content=file.read_bytes()) for file in file_paths]
    with cache_optional():
        remember(path, CompiledFiles(files=tuple(files), keys=tuple(sorted(keys))))
