"""Runs in a recorder process: loads the weights from the bundle's file to the GPU, and computes digests that show changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cgbundle.format import safetensors, safetensors_files
from cgbundle.format.schema import HOST, Weight

from ...model.flat_module import PREFIX
from ...targets.memory_layout import tensor_bytes

BLOCK = 16 << 20
"""Bytes read at a time into one of two pinned buffers, while the other is copied.  Above 4 MB, copies do not become faster."""

WORDS = 4 << 20
"""8-byte words that `digest` processes at a time: temporaries take a few times their size."""


def upload(path: Path, rows: Iterable[Weight], buffers: Mapping[str, torch.Tensor]) -> None:
    """Copies the tensors of `rows` from the file, or zeros, to their offsets in the uint8 buffers.  `buffers`: by memory name."""
    (device,) = {buffer.device for buffer in buffers.values()}
    pinned = device.type == "cuda"
    blocks = [torch.empty(BLOCK, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    copied: list[Any] = [None, None]
    buffer_index = 0
    rows = list(rows)
    for row in [row for row in rows if row.zeros]:
        buffers[row.memory][row.offset : row.offset + tensor_bytes(row.dtype, row.shape)].zero_()
    with open(path, "rb", buffering=0) as file:
        entries = safetensors.read_header(file, str(path))
        uploaded = {row.tensor: row for row in rows if row.memory != HOST and not row.zeros}
        for row in sorted(uploaded.values(), key=lambda row: entries[_stored(row)].begin):
            entry = entries[_stored(row)]
            file.seek(entry.begin)
            for start in range(0, entry.end - entry.begin, BLOCK):
                block = blocks[buffer_index][: min(BLOCK, entry.end - entry.begin - start)]
                if copied[buffer_index] is not None:
                    copied[buffer_index].synchronize()
                _fill(file, memoryview(block.numpy()))
                at = row.offset + start
                buffers[row.memory][at : at + block.numel()].copy_(block, non_blocking=True)
                if pinned:
                    copied[buffer_index] = torch.cuda.Event()
                    copied[buffer_index].record()
                buffer_index = 1 - buffer_index
    if pinned:
        torch.cuda.synchronize(device)


def _fill(file: Any, view: memoryview) -> None:
    """Reads from the file until `view` is full.  Raises EOFError."""
    while view:
        count = file.readinto(view)
        if not count:
            raise EOFError("the file of weights ended early")
        view = view[count:]


def on_host(path: Path, rows: Iterable[Weight]) -> dict[str, torch.Tensor]:
    """Returns the tensors that only the host reads, by name, as views of the mapped file: pages load when they are read."""
    host_rows = [row for row in rows if row.memory == HOST]
    if not host_rows:
        return {}
    mapped = safetensors_files.Mapped(str(path), str(path), writable=True)  # torch.frombuffer warns about read-only memory
    tensors = {}
    for row in host_rows:
        dtype = getattr(torch, row.dtype)
        size = tensor_bytes(row.dtype, row.shape)
        flat = torch.frombuffer(mapped.data(_stored(row)), dtype=dtype) if size else torch.empty(0, dtype=dtype)
        tensors[row.name] = flat.as_strided(row.shape, row.strides)
    return tensors


def digests(rows: Sequence[Weight], buffers: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Returns a 64-bit digest of every tensor's bytes, by name.  A change of any one word changes the digest."""
    owners = [row for row in rows if row.tensor == row.name and row.memory != HOST]
    checksums = [digest(buffers[row.memory][row.offset : row.offset + tensor_bytes(row.dtype, row.shape)]) for row in owners]
    values = torch.stack(checksums).tolist() if checksums else []
    return {row.name: value for row, value in zip(owners, values, strict=True)}


def digest(data: torch.Tensor) -> torch.Tensor:
    """Returns the sum of all 8-byte words, each mixed and multiplied by a distinct odd number; int64 scalar, modulo 2^64."""
    end = data.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for number, words in enumerate([*data[:end].view(torch.int64).split(WORDS), data[end:].to(torch.int64)]):
        odd = torch.arange(number * WORDS, number * WORDS + words.numel(), device=data.device) * 2 + 1
        total += (mixed(words) * odd).sum()
    return total


def mixed(words: torch.Tensor) -> torch.Tensor:
    """XORs the upper bits of words into the lower ones, before the multiplication by odd numbers.  0 stays 0."""
    return words ^ (words >> 29)


def _stored(row: Weight) -> str:
    """Returns the name of a row's tensor in the file."""
    return row.tensor.removeprefix(PREFIX)
