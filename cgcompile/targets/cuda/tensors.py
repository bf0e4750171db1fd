"""The program's tensors: their layouts as records, and tensors at chosen addresses.  `__cuda_array_interface__` and `Tensor.set_`
give each tensor its own storage, because AOTAutograd treats views of one storage as aliases."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from cgbundle.format.schema import HOST, Weight

from ..memory_layout import UploadedValue, align, dense_strides, tensor_bytes
from ..weights import stored_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """Device memory with the CUDA array interface.  `owner` keeps the memory alive; None: the caller must."""

    address: int
    size: int
    owner: torch.Tensor | None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.address, False), "strides": None}


def _tensor(address: int, owner: torch.Tensor | None, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor with a separate storage at `address`."""
    empty = torch.empty(0, dtype=getattr(torch, dtype), device="cuda")
    size = tensor_bytes(dtype, shape)
    if not size:
        return empty.new_empty(shape)
    storage = torch.as_tensor(_Span(address=address, size=size, owner=owner), device="cuda").untyped_storage()
    return empty.set_(storage, 0, shape, strides)


def device_bytes(address: int, size: int) -> torch.Tensor:
    """Returns memory of the current device as a flat uint8 tensor of at least one byte.  The caller must keep the memory alive."""
    return torch.as_tensor(_Span(address=address, size=size, owner=None), device="cuda")


def tensor_at(buffer: torch.Tensor, offset: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor with a separate storage at `offset` bytes into a one-dimensional uint8 buffer on the device."""
    return _tensor(buffer.data_ptr() + offset, buffer, dtype, shape, strides)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """The address and layout of a tensor on the device, without a reference to its memory.  Strides count elements."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """Returns the tensor again, which must be dense.  Its memory must still be allocated."""
        return _tensor(self.address, None, self.dtype, self.shape, self.strides)


def tensor_place(tensor: torch.Tensor) -> TensorPlace:
    return TensorPlace(address=tensor.data_ptr(), dtype=stored_dtype(tensor), shape=tuple(tensor.shape), strides=tensor.stride())


def weights_at(rows: Iterable[Weight], buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of `rows` on the device, by name, at their offsets in the buffers.  Tied weights are one tensor."""
    placed: dict[str, torch.Tensor] = {}
    named: dict[str, torch.Tensor] = {}
    for row in rows:
        if row.memory == HOST:
            continue
        if row.tensor not in placed:
            placed[row.tensor] = tensor_at(buffers[row.memory], row.offset, row.dtype, row.shape, row.strides)
        named[row.name] = placed[row.tensor]
    return named


def point_weights(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replaces the module's parameters, buffers and attributes of these names by the tensors."""
    for path, tensor in tensors.items():
        owner_name, _, leaf = path.rpartition(".")
        owner: Any = module
        for name in owner_name.split(".") if owner_name else ():
            owner = getattr(owner, name, None)
        current = getattr(owner, leaf, None)
        if current is None:  # a tensor that the graph does not use
            continue
        if isinstance(current, torch.nn.Parameter):
            current.data = tensor
        else:
            setattr(owner, leaf, tensor)


def tensors_of(call: Any) -> list[torch.Tensor]:
    """Returns the tensors among the arguments or results of a call, in order."""
    return [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]


def input_offsets(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Returns the offset of each input in memory `inputs`, one after the other, and the aligned end of the last input.  At least
    one byte is between two inputs, because a donated input may be elsewhere (`Manifest.donations`)."""
    offsets = [0]
    for tensor in tensors:
        offsets.append(align(offsets[-1] + tensor_bytes(stored_dtype(tensor), tensor.shape) + 1))
    return tuple(offsets)


def place_inputs(tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> list[torch.Tensor]:
    """Returns static inputs: copies of `tensors` at the `input_offsets` in `buffer`."""
    placed = []
    for tensor, offset in zip(tensors, input_offsets(tensors), strict=False):
        shape = tuple(tensor.shape)
        static = tensor_at(buffer, offset, stored_dtype(tensor), shape, dense_strides(shape, tensor.stride()))
        placed.append(static.copy_(tensor))
    return placed


def static_bytes(tensors: Iterable[torch.Tensor], uploads: Iterable[UploadedValue]) -> int:
    """Returns the bytes of memory `inputs`, without PAD, for the inputs of the call, followed by the values of host regions."""
    return max([input_offsets(tensors)[-1], *[value.end for value in uploads]])


def settings() -> dict[str, Any]:
    """Returns the global settings of torch that select kernels, for `apply_settings` in another process."""
    return {path: operator.attrgetter(path)(torch) for path in _SETTINGS} | {"": torch.get_float32_matmul_precision()}


def apply_settings(values: Mapping[str, Any]) -> None:
    for path, value in values.items():
        if path:
            owner, _, leaf = path.rpartition(".")
            setattr(operator.attrgetter(owner)(torch), leaf, value)
    torch.set_float32_matmul_precision(values[""])


_SETTINGS = (
    "backends.cudnn.allow_tf32",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.enabled",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
)
