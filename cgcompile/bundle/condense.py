"""The self-test of a bundle, kept small beside its weights: large expected outputs are condensed once they have been verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from cgbundle.format import file_names, safetensors_writer
from cgbundle.format.safetensors import Mapped
from cgbundle.format.schema import DTYPES, Manifest
from cgbundle.tensors import comparison
from cgbundle.tensors.self_test_tensors import is_exact, self_test_tensors

from ..util.raw_bytes import raw
from .self_test import from_bytes

LEAST, SHARE = 32 << 20, 0.05
"""A self-test may take so many bytes, and so much of the weights."""

WORTH = 1 << 20
"""Bytes from which on a tensor is condensed."""


def condense(stage: Path, manifest: Manifest) -> None:
    """Condenses the largest expected tensors of the self-test in `stage` until it is small enough, or none is left to condense.

    Where bits are promised, and of integers that have to be equal, hashes of blocks remain.  Floats within a tolerance have
    samples and statistics beside them.  Integers of which some may differ stay whole, as do numbers that are not finite.
    """
    path = stage / file_names.SELF_TEST
    weights = stage / file_names.WEIGHTS
    limit = max(LEAST, int(SHARE * weights.stat().st_size) if weights.exists() else 0)
    size = path.stat().st_size
    if size <= limit:
        return
    stored = Mapped(str(path), path.name)
    try:
        tensors: dict[str, safetensors_writer.Tensor] = {
            name: (row.dtype, row.shape, partial(stored.data, name)) for name, row in stored.entries.items()
        }
        candidates = [(prod(tensors[name][1]) * DTYPES[tensors[name][0]], name, bits) for name, bits in _expected(manifest)]
        for taken, name, bits in sorted(candidates, reverse=True):
            if size <= limit or taken < WORTH:
                break
            instead = _condensed(name, tensors[name], bits=bits)
            if instead:
                del tensors[name]
                tensors |= instead
                size -= taken - sum(prod(shape) * DTYPES[dtype] for dtype, shape, _ in instead.values())
        new = path.with_name(f"{path.name}.new")
        with open(new, "wb") as file:
            safetensors_writer.write(file, tensors)
    finally:
        stored.close()
    new.replace(path)


def _expected(manifest: Manifest) -> Iterator[tuple[str, bool]]:
    """The names of what replays are compared with, and whether the bits have to be equal; without integers that may differ."""
    for entry in manifest.entries:
        for proof in entry.self_test.proofs:
            for row, bound in zip(self_test_tensors(manifest, entry), entry.self_test.bounds, strict=True):
                bits = entry.self_test.compare == "bits" or is_exact(row.dtype)
                if entry.self_test.compare == "bits" or not (is_exact(row.dtype) and bound):
                    yield file_names.self_test_entry(proof.key, row.kind, row.index, entry.name), bits


def _condensed(name: str, tensor: safetensors_writer.Tensor, *, bits: bool) -> dict[str, safetensors_writer.Tensor]:
    """What takes the place of a tensor; {} where it has to stay."""
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
    """As `comparison.statistics`, of blocks of `count` elements, float64 [blocks, 3]."""
    rows = []
    numbers, count = (torch.view_as_real(value).reshape(-1), 2 * count) if value.is_complex() else (value, count)
    for block in numbers.split(count):
        wide = block.double()
        rows.append(torch.stack([wide.abs().max(), wide.mean(), wide.square().mean().sqrt()]))
    return torch.stack(rows) if rows else torch.empty(0, 3, dtype=torch.float64)
