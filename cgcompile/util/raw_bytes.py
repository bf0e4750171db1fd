"""The bytes of a tensor and of its storage, here or on another device."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


def raw(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order, uint8: a view where that is possible, which it is not of a conjugate or a negative
    that torch has not computed yet.  (`view(torch.uint8)` refuses a tensor of one element whose only stride is not 1, although it
    is contiguous.)"""
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By the bytes of an element: what its bits are compared as, two and two for 16 bytes."""

AT_ONCE = 1 << 28
"""Elements that are looked at at a time: on a GPU `nonzero` takes fewer than 2^31."""


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether all bytes of a tensor are 0, those of -0.0 are not."""
    return not any(bool(part.any()) for part in raw(tensor).split(AT_ONCE))


LARGE = 1 << 24
"""Bytes from which a copy on the CPU leaves zeros out."""

BLOCK, WIDE = 1 << 18, 1 << 26
"""Bytes that are copied or left out at once; bytes of which all blocks are left out at once."""


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy.  In the host's memory the zeros of a large one take none: a cache of zeros may take most of what there is."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not _is_dense(tensor) or tensor.nbytes < LARGE:
        return tensor.clone()
    buffer = torch.frombuffer(mmap.mmap(-1, tensor.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    for old, new in _blocks(raw(tensor), buffer, lambda old, new: bool(old.any())):
        new.copy_(old)
    return buffer.view(tensor.dtype).view(tensor.shape)


def put_back(tensor: torch.Tensor, first: torch.Tensor) -> None:
    """Writes what `first`, of the same shape and dtype, holds, and only where anything else is there: zeros that take no memory
    stay so, and who asks for `_version` sees whether there was anything to write."""
    if not (_is_dense(tensor) and _is_dense(first)):
        if not same_bits(tensor, first):
            tensor.copy_(first)
        return
    for now, old in _blocks(raw(tensor), raw(first), lambda now, old: not same_bits(now, old)):
        now.copy_(old)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is torch's own kind and lies in memory as `raw` gives it."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _blocks(one: torch.Tensor, other: torch.Tensor, differ: Callable[[torch.Tensor, torch.Tensor], bool]) -> Iterator[Pair]:
    """Pairs of blocks that differ; where wide ones do not, none within is looked at."""
    for wide in zip(one.split(WIDE), other.split(WIDE), strict=True):
        if differ(*wide):
            yield from [pair for pair in zip(wide[0].split(BLOCK), wide[1].split(BLOCK), strict=True) if differ(*pair)]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype, shape and device are alike in every bit.  Contiguous ones take no memory for it."""
    one, other = raw(one), raw(other)
    if (one.storage_offset() | other.storage_offset() | one.numel()) % 8 == 0:  # eight bytes at once: 32 GB/s instead of 4
        one, other = one.view(torch.int64), other.view(torch.int64)
    return torch.equal(one, other)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Where a flat bool tensor is true, int64, ascending."""
    indices = [part.nonzero().reshape(-1) + number * AT_ONCE for number, part in enumerate(mask.split(AT_ONCE))]
    return indices[0] if len(indices) == 1 else torch.cat(indices)


def changes(before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where two flat, dense tensors of one dtype, size and device differ in a bit: pairs [first element, number of elements], int64
    (runs, 2), and these elements of `after`, one after the other.  All stays on their device."""
    width = after.element_size()
    differ = before.view(WHOLE[width]) != after.view(WHOLE[width])
    places = positions(differ.view(-1, 2).any(1) if width == 16 else differ)
    if not places.numel():
        return places.reshape(0, 2), after[:0]
    breaks = (places.diff() != 1).nonzero().reshape(-1) + 1
    starts = torch.nn.functional.pad(breaks, (1, 0))
    counts = torch.nn.functional.pad(breaks, (0, 1), value=places.numel()) - starts
    return torch.stack([places[starts], counts], dim=1), after[places]


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage, uint8: a view."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def seen_as(storage: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The storage of `storage` as `like` sees its own: dtype, offset, shape and strides."""
    view = torch.empty(0, dtype=like.dtype, device=storage.device)
    return view.set_(storage.untyped_storage(), like.storage_offset(), like.size(), like.stride())


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of these values and strides on `device`; itself where it is there."""
    if tensor.device == device:
        return tensor
    device_tensor = tensor.to(device)
    return device_tensor if device_tensor.stride() == tensor.stride() else seen_as(storage_bytes(tensor).to(device), tensor)
