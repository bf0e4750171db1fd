"""Keeps the self-test of a bundle small compared with its weights.  Condenses large expected outputs after their verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from cgbundle.format import file_names, safetensors_files
from cgbundle.format.file_names import is_exact, self_test_tensors
from cgbundle.format.safetensors_files import Mapped
from cgbundle.format.schema import DTYPES, Manifest
from cgbundle.tensors import comparison

from ..util.raw_bytes import raw
from .self_test import from_bytes

LEAST, SHARE = 32 << 20, 0.05
"""Maximum size of a self-test: this number of bytes, or this share of the weights' bytes if that is more."""

WORTH = 1 << 20
"""Smallest tensor, in bytes, that is condensed."""


def condense(stage: Path, manifest: Manifest) -> None:
    """Condenses the largest expected tensors of the self-test in `stage` until the file is below the limit, or none is left.
    Tensors that must be equal in every bit, and integers that must be equal, become hashes of blocks.  Floats with a tolerance also
    get samples and statistics.  Integers that may differ, and tensors with infinite or NaN values, are not condensed."""
    path = stage / file_names.SELF_TEST
    weights = stage / file_names.WEIGHTS
    limit = max(LEAST, int(SHARE * weights.stat().st_size) if weights.exists() else 0)
    size = path.stat().st_size
    if size <= limit:
        return
    stored = Mapped(str(path), path.name)
    try:
        tensors: dict[str, safetensors_files.Tensor] = {
            name: (row.dtype, row.shape, partial(stored.data, name)) for name, row in stored.entries.items()
        }
        candidates = [(prod(tensors[name][1]) * DTYPES[tensors[name][0]], name, bits) for name, bits in _expected(manifest)]
        for n_bytes, name, bits in sorted(candidates, reverse=True):
            if size <= limit or n_bytes < WORTH:
                break
            replacement = _condensed(name, tensors[name], bits=bits)
            if replacement:
                del tensors[name]
                tensors |= replacement
                size -= n_bytes - sum(prod(shape) * DTYPES[dtype] for dtype, shape, _ in replacement.values())
        new = path.with_name(f"{path.name}.new")
        with open(new, "wb") as file:
            safetensors_files.write(file, tensors)
    finally:
        stored.close()
    new.replace(path)


def _expected(manifest: Manifest) -> Iterator[tuple[str, bool]]:
    """Yields the names of the expected tensors, and whether their bits must be equal.  Omits integers that may differ."""
    for entry in manifest.entries:
        for proof in entry.self_test.proofs:
            for row, bound in zip(self_test_tensors(manifest, entry), entry.self_test.bounds, strict=True):
                bits = entry.self_test.compare == "bits" or is_exact(row.dtype)
                if entry.self_test.compare == "bits" or not (is_exact(row.dtype) and bound):
                    yield file_names.self_test_entry(proof.key, row.kind, row.index, entry.name), bits


def _condensed(name: str, tensor: safetensors_files.Tensor, *, bits: bool) -> dict[str, safetensors_files.Tensor]:
    """Returns the tensors that replace a tensor, or {} if it cannot be condensed."""
    dtype, shape, contents = tensor
    elements, data = prod(shape), bytes(contents())
    equal, near = comparison.expected_shapes(name, dtype, elements)
    contents_of: list[Callable[[], Any]] = [partial(comparison.block_hashes, data)]
    if not bits:
        rows = _statistics(from_bytes(data, dtype), comparison.BLOCK // DTYPES[dtype])
        if not bool(rows.isfinite().all()):
            return {}
        contents_of += [partial(comparison.taken, dtype, data), lambda: raw(rows).numpy()]
    shapes = equal if bits else near
    return {part: (*shape, write) for (part, shape), write in zip(shapes.items(), contents_of, strict=True)}


def _statistics(value: torch.Tensor, count: int) -> torch.Tensor:
    """Computes `comparison.statistics` of blocks of `count` elements: float64 [blocks, 3]."""
    rows = []
    numbers, count = (torch.view_as_real(value).reshape(-1), 2 * count) if value.is_complex() else (value, count)
    for block in numbers.split(count):
        block64 = block.double()
        rows.append(torch.stack([block64.abs().max(), block64.mean(), block64.square().mean().sqrt()]))
    return torch.stack(rows) if rows else torch.empty(0, 3, dtype=torch.float64)
