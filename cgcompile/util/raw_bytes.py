"""Compares, copies and moves the raw bytes of tensors and storages."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


def raw(value: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor in row-major order as a flat uint8 tensor.  It is a view unless the tensor is not contiguous,
    or its conjugate or negative bit is set.  (`view(torch.uint8)` refuses a contiguous tensor of one element whose stride is not
    1.)"""
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""The integer dtype for bitwise comparison, by the bytes of an element.  An element of 16 bytes is compared as two integers."""

AT_ONCE = 1 << 28
"""Elements per operation: `nonzero` on a GPU takes fewer than 2^31."""


def is_zero(tensor: torch.Tensor) -> bool:
    """Returns whether all bytes of a tensor are 0; those of -0.0 are not."""
    return not any(bool(chunk.any()) for chunk in raw(tensor).split(AT_ONCE))


LARGE = 1 << 24
"""A copy on the CPU of at least this many bytes skips blocks of zeros."""

BLOCK, WIDE = 1 << 18, 1 << 26
"""BLOCK: bytes of a block that is copied or skipped.  WIDE: bytes of a larger block, which is checked first."""


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor.  A large copy on the CPU skips blocks of zeros.  Their pages then take no memory, for example those of an
    unused cache."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not _is_dense(tensor) or tensor.nbytes < LARGE:
        return tensor.clone()
    buffer = torch.frombuffer(mmap.mmap(-1, tensor.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    for old, new in _blocks(raw(tensor), buffer, lambda old, new: bool(old.any())):
        new.copy_(old)
    return buffer.view(tensor.dtype).view(tensor.shape)


def put_back(tensor: torch.Tensor, first: torch.Tensor) -> None:
    """Writes the contents of `first`, of the same shape and dtype, only to blocks that differ.  Untouched pages of zeros then stay
    unallocated, and `_version` changes only if something differed."""
    if not (_is_dense(tensor) and _is_dense(first)):
        if not same_bits(tensor, first):
            tensor.copy_(first)
        return
    for now, old in _blocks(raw(tensor), raw(first), lambda now, old: not same_bits(now, old)):
        now.copy_(old)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a plain torch tensor whose memory layout is the one of `raw`."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _blocks(first: torch.Tensor, second: torch.Tensor, differ: Callable[[torch.Tensor, torch.Tensor], bool]) -> Iterator[Pair]:
    """Yields the pairs of blocks for which `differ` is true.  Wide blocks are checked first."""
    for wide in zip(first.split(WIDE), second.split(WIDE), strict=True):
        if differ(*wide):
            yield from [pair for pair in zip(wide[0].split(BLOCK), wide[1].split(BLOCK), strict=True) if differ(*pair)]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of one dtype, shape and device are bitwise equal.  Contiguous tensors are not copied."""
    one, other = raw(one), raw(other)
    if (one.storage_offset() | other.storage_offset() | one.numel()) % 8 == 0:  # compares eight bytes at once: 32 GB/s instead of 4
        one, other = one.view(torch.int64), other.view(torch.int64)
    return torch.equal(one, other)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Returns the indices of the true elements of a flat bool tensor, int64, ascending."""
    indices = [chunk.nonzero().reshape(-1) + number * AT_ONCE for number, chunk in enumerate(mask.split(AT_ONCE))]
    return indices[0] if len(indices) == 1 else torch.cat(indices)


def changes(before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds where two flat, dense tensors of one dtype, size and device differ bitwise.  Returns runs [first element, number of
    elements], int64 (runs, 2), and the differing elements of `after`, concatenated.  Both stay on the device."""
    width = after.element_size()
    differ = before.view(WHOLE[width]) != after.view(WHOLE[width])
    indices = positions(differ.view(-1, 2).any(1) if width == 16 else differ)
    if not indices.numel():
        return indices.reshape(0, 2), after[:0]
    breaks = (indices.diff() != 1).nonzero().reshape(-1) + 1
    starts = torch.nn.functional.pad(breaks, (1, 0))
    counts = torch.nn.functional.pad(breaks, (0, 1), value=indices.numel()) - starts
    return torch.stack([indices[starts], counts], dim=1), after[indices]


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all bytes of a tensor's storage as a uint8 view."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def seen_as(storage: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a view of the storage of `storage` with the dtype, offset, shape and strides of `like`."""
    view = torch.empty(0, dtype=like.dtype, device=storage.device)
    return view.set_(storage.untyped_storage(), like.storage_offset(), like.size(), like.stride())


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the tensor on `device` with the same values and strides, or the tensor itself if it is already there."""
    if tensor.device == device:
        return tensor
    device_tensor = tensor.to(device)
    return device_tensor if device_tensor.stride() == tensor.stride() else seen_as(storage_bytes(tensor).to(device), tensor)
