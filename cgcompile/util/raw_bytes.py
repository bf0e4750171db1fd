"""The bytes of a tensor and of its storage, here or on another device."""

from __future__ import annotations

import torch


def raw(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order, uint8: a view where that is possible.  (`view(torch.uint8)` refuses a tensor of one
    element whose only stride is not 1, although it is contiguous.)"""
    flat = value.detach().contiguous().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage, uint8: a view."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def seen_as(storage: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The storage of `storage` as `like` sees its own: dtype, offset, shape and strides."""
    made = torch.empty(0, dtype=like.dtype, device=storage.device)
    return made.set_(storage.untyped_storage(), like.storage_offset(), like.size(), like.stride())


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of these values and strides on `device`; itself where it is there."""
    if tensor.device == device:
        return tensor
    made = tensor.to(device)
    return made if made.stride() == tensor.stride() else seen_as(storage_bytes(tensor).to(device), tensor)
