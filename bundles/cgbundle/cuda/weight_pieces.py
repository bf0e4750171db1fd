"""Which bytes of a bundle's files are weights of the GPU, where they belong, and how they are cut for the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import BundleError
from ..format.archive import Archive
from ..format.file_names import WEIGHTS, weight_files
from ..format.safetensors import Entry
from ..format.schema import Weight
from ..session.weight_reads import announce

FIRST = 256 << 20
"""Bytes that the disk begins to read while the driver starts."""


class Piece(NamedTuple):
    """`size` bytes at `begin` of the file that belong at `target` of memory weights."""

    begin: int
    size: int
    target: int


def listed(bundle: Archive) -> dict[str, list[Piece]]:
    """By file, what of the bundle's weights belongs on the GPU; the disk begins to read.  Raises weights-invalid."""
    found = {}
    for file, weights in weight_files(bundle.manifest).items():
        rows = [weight for weight in weights if weight.memory == "weights"]
        if rows and (parts := _listed(bundle, file, rows)):
            found[file] = parts
    return found


def _listed(bundle: Archive, name: str, rows: Sequence[Weight]) -> list[Piece]:
    found = pieces(rows, bundle.tensors(name), dict(bundle.manifest.memories).get("weights", 0), name)
    places, left = [], FIRST
    for piece in found:
        places.append((piece.begin, min(piece.size, left)))
        left -= places[-1][1]
    announce(bundle.descriptor(name), places)
    return found


def pieces(weights: Sequence[Weight], entries: Mapping[str, Entry], capacity: int, file: str = WEIGHTS) -> list[Piece]:
    """Where the bytes of a file go, in the file's order: tied weights once, what is adjacent in both places as one.  `capacity`:
    bytes of memory weights; `file`: its name.  Raises weights-invalid where the file lacks a weight or the memory is too small."""
    found = set()
    for weight in weights:
        entry = entries.get(weight.tensor)
        if entry is None:
            raise BundleError("weights-invalid", f"{file}: no tensor {weight.tensor!r}, which weight {weight.name!r} names")
        size = entry.end - entry.begin
        if weight.offset + size > capacity:
            raise BundleError(
                "weights-invalid",
                f"weight {weight.name!r}: {size} bytes at {weight.offset} of memory weights, which has {capacity}",
            )
        if size:
            found.add(Piece(entry.begin, size, weight.offset))
    merged: list[Piece] = []
    for piece in sorted(found):
        last = merged[-1] if merged else Piece(-1, 0, -1)
        if last.begin + last.size == piece.begin and last.target + last.size == piece.target:
            merged[-1] = Piece(last.begin, last.size + piece.size, last.target)
        else:
            merged.append(piece)
    return merged


def chunks(listed: Sequence[Piece], size: int) -> list[list[Piece]]:
    """The pieces cut and grouped so that each group lies within `size` bytes of the file, from a multiple of `size` on."""
    groups: list[list[Piece]] = []
    limit = -1
    for piece in listed:
        done = 0
        while done < piece.size:
            begin = piece.begin + done
            if begin >= limit:
                groups.append([])
                limit = begin - begin % size + size
            step = min(piece.size - done, limit - begin)
            groups[-1].append(Piece(begin, step, piece.target + done))
            done += step
    return groups


def place(group: Sequence[Piece]) -> tuple[int, int]:
    """Where a group begins in the file, and its bytes from the first to the last."""
    return group[0].begin, group[-1].begin + group[-1].size - group[0].begin
