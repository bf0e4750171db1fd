"""Inside a recorder process: the weights, from the bundle's file to the GPU without a copy on the host; whether they changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cgbundle.format import safetensors
from cgbundle.format.schema import HOST, Weight

from ...model.flat_module import PREFIX
from ...targets.memory_layout import tensor_bytes

BLOCK = 16 << 20
"""Bytes read at a time, into one of two pinned buffers while the other is on its way: above 4 MB the bus's speed does not grow."""


WORDS = 4 << 20
"""Words of 8 bytes that a digest takes at a time: what it needs beside the weights is a few times that."""


def upload(path: Path, rows: Iterable[Weight], buffers: Mapping[str, torch.Tensor]) -> None:
    """Copies the tensors of `rows` from the file, or zeros, to their offsets in the buffers (uint8) of their memories."""
    (device,) = {buffer.device for buffer in buffers.values()}
    pinned = device.type == "cuda"
    blocks = [torch.empty(BLOCK, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    copied: list[Any] = [None, None]
    turn = 0
    rows = list(rows)
    for row in [row for row in rows if row.zeros]:
        buffers[row.memory][row.offset : row.offset + tensor_bytes(row.dtype, row.shape)].zero_()
    with open(path, "rb", buffering=0) as file:
        entries = safetensors.read_header(file, str(path))
        wanted = {row.tensor: row for row in rows if row.memory != HOST and not row.zeros}
        for row in sorted(wanted.values(), key=lambda row: entries[_stored(row)].begin):
            entry = entries[_stored(row)]
            file.seek(entry.begin)
            for start in range(0, entry.end - entry.begin, BLOCK):
                block = blocks[turn][: min(BLOCK, entry.end - entry.begin - start)]
                if copied[turn] is not None:
                    copied[turn].synchronize()
                _fill(file, memoryview(block.numpy()))
                at = row.offset + start
                buffers[row.memory][at : at + block.numel()].copy_(block, non_blocking=True)
                if pinned:
                    copied[turn] = torch.cuda.Event()
                    copied[turn].record()
                turn = 1 - turn
    if pinned:
        torch.cuda.synchronize(device)


def _fill(file: Any, view: memoryview) -> None:
    """Reads until `view` is full."""
    while view:
        count = file.readinto(view)
        if not count:
            raise EOFError("the file of weights ended early")
        view = view[count:]


def on_host(path: Path, rows: Iterable[Weight]) -> dict[str, torch.Tensor]:
    """The tensors that the host alone reads, by name: views of the mapped file, which takes no memory until it is read."""
    wanted = [row for row in rows if row.memory == HOST]
    if not wanted:
        return {}
    mapped = safetensors.Mapped(str(path), str(path), writable=True)  # torch wants memory that could be written to
    tensors = {}
    for row in wanted:
        dtype = getattr(torch, row.dtype)
        some = tensor_bytes(row.dtype, row.shape)
        flat = torch.frombuffer(mapped.data(_stored(row)), dtype=dtype) if some else torch.empty(0, dtype=dtype)
        tensors[row.name] = flat.as_strided(row.shape, row.strides)
    return tensors


def digests(rows: Sequence[Weight], buffers: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """64 bits of every tensor's bytes, by name; each change of one word changes them."""
    owners = [row for row in rows if row.tensor == row.name and row.memory != HOST]
    checksums = [digest(buffers[row.memory][row.offset : row.offset + tensor_bytes(row.dtype, row.shape)]) for row in owners]
    values = torch.stack(checksums).tolist() if checksums else []
    return {row.name: value for row, value in zip(owners, values, strict=True)}


def digest(data: torch.Tensor) -> torch.Tensor:
    """Sum of all words, each mixed and multiplied with an odd number of its own; int64, modulo 2^64."""
    whole = data.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for number, words in enumerate([*data[:whole].view(torch.int64).split(WORDS), data[whole:].to(torch.int64)]):
        odd = torch.arange(number * WORDS, number * WORDS + words.numel(), device=data.device) * 2 + 1
        total += (mixed(words) * odd).sum()
    return total


def mixed(words: torch.Tensor) -> torch.Tensor:
    """Words whose upper bits reach the lower ones, before odd numbers are multiplied with them.  0 stays 0."""
    return words ^ (words >> 29)


def _stored(row: Weight) -> str:
    """The name of a row's tensor in the file."""
    return row.tensor.removeprefix(PREFIX)
