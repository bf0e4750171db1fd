"""Caches the tried lowerings by the program's contents.  The same program on the same kind of GPU needs no second search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from cgbundle.format.schema import IntKey, Lowering

from ...targets.build_spec import BuildSpec
from ...targets.cuda.tensors import settings
from ...targets.program_contents import program_contents, tensor_layout
from ...util.content_cache import cache_folder, cache_optional, cache_path, recall, remember

STAGE = "autotune"
"""The folder of the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedLowerings:
    """The tried lowerings of every build key, in order."""

    keys: tuple[tuple[Lowering, ...], ...]


def kept_path(spec: BuildSpec) -> Path | None:
    """Returns the cache file for these programs, sizes and kind of GPU, or None if there is no cache."""
    with cache_optional():
        folder = cache_folder()
        by_key, calls = spec.programs.by_key, spec.calls()
        digests = program_contents(by_key.values())
        keys = [(str(key), digests[id(by_key[key])], [tensor_layout(tensor) for tensor in calls[key]]) for key in by_key]
        gpu = torch.cuda.get_device_properties(0)
        machine = spec.chosen.target, gpu.name, gpu.multi_processor_count, gpu.total_memory, torch.version.cuda
        placements = [sorted(node_names) for entry in spec.entries for node_names in entry.placements.values()]
        self_test_calls = [entry.self_test_calls for entry in spec.entries]
        return cache_path(folder, STAGE, keys, machine, placements, self_test_calls, spec.donations, spec.options.allow, settings())
    return None


def recall_lowerings(path: Path | None, spec: BuildSpec) -> dict[IntKey, tuple[Lowering, ...]] | None:
    """Returns the tried lowerings by build key from an earlier build of these programs, or None."""
    tried = recall(path, TriedLowerings) if path is not None else None
    if tried is None or len(tried.keys) != len(spec.programs.by_key):
        return None
    return {key: rows for key, rows in zip(spec.programs.by_key, tried.keys, strict=True) if rows}


def keep_lowerings(path: Path | None, tried: Mapping[IntKey, tuple[Lowering, ...]], spec: BuildSpec) -> None:
    """Writes the tried lowerings to the cache, if there is one."""
    if path is not None:
        with cache_optional():
            remember(path, TriedLowerings(keys=tuple([tried.get(key, ()) for key in spec.programs.by_key])))
