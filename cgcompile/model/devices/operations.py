"""Runs an operation of the user's code on the device of its tensors.

If eager PyTorch runs the model on a GPU, moves copy tensors, and operations on the host run on the CPU.  Otherwise, and while the
model is traced, nothing moves: a move is only a marker operator (markers.py).

Private interfaces (torch 2.11, 2.13): `torch.utils._device._device_constructors`, the functions that create tensors, and the
functions of `torch._VF` for packed sequences and LSTMs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

from .tensor_places import CPU, DEVICE, FREE, HOST, TensorPlaces
from .tracing import called, is_traced, real_device, tensors_in

_OTHER = {HOST: DEVICE, DEVICE: HOST}

_AT_FIRST = frozenset({
    torch.Tensor.copy_, torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.index_put_, torch.Tensor.index_put,
    torch._VF._pack_padded_sequence,
})  # fmt: skip
"""Functions that run where their first tensor is."""

_CROSSING = _AT_FIRST | {torch.tensor_split, torch.Tensor.tensor_split}
"""Functions that PyTorch allows to mix host and device: copies, and indices and lengths on the host."""


def operate(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an operation that needs no special handling."""
    requested = None
    if isinstance(func, torch._ops.OpOverload):  # a saved program has the devices of its export
        args, kwargs = pytree.tree_map_only(torch.device, lambda old: old if old.type == "meta" else places.real, (args, kwargs))
    else:
        requested = _requested_device(places, kwargs)
        if kwargs.get("device") is None and places.real != CPU and func in _constructors():
            kwargs["device"] = places.real
    tensors = tensors_in((args, kwargs))
    side = _side(places, func, args, tensors)
    foreign = [tensor for tensor in tensors if places.place(tensor) == _OTHER.get(side) and (tensor.dim() or side == HOST)]
    if foreign:
        if func not in _CROSSING:
            name = getattr(func, "__name__", func)
            places.saw("several-devices", f"{name}: expected all tensors to be on the same device, found the GPU and the CPU")
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: places.moved(tensor, side), (args, kwargs))
    return places.noted(run_at(places, func, args, kwargs, side), side, requested)


def run_at(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any], side: str) -> Any:
    """Runs an operation with its tensors on the real device of `side`.  If it writes to a copy, updates the original tensor."""
    if places.real == CPU:
        return called(func, args, kwargs)
    device = CPU if side == HOST and not is_traced((args, kwargs)) else places.real
    copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if real_device(tensor).type in (device.type, "meta"):
            return tensor
        tensor_copy = tensor.to(device)
        copies.append((tensor, tensor_copy, tensor_copy._version))
        return tensor_copy

    args, kwargs = pytree.tree_map_only(torch.Tensor, move, (args, kwargs))
    result = called(func, args, kwargs)
    origin = {id(device_copy): tensor for tensor, device_copy, _ in copies}
    for tensor, device_copy, version in copies:
        if device_copy._version != version:
            tensor.copy_(device_copy)
    if not tensors_in(result):
        return result  # a torch.Size would become a tuple below
    return pytree.tree_map_only(torch.Tensor, lambda tensor: origin[id(tensor)] if id(tensor) in origin else move(tensor), result)


def recurrent(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a recurrent layer.  PyTorch needs the batch sizes of a packed sequence on the host."""
    data, sizes, *others = args
    if not isinstance(sizes, torch.Tensor) or sizes.dtype != torch.int64:  # then `sizes` has the states
        return operate(places, func, args, kwargs)
    host_sizes = sizes if places.real == CPU or is_traced((args, kwargs)) else sizes.to(CPU)
    return operate(places, lambda data, *others, **named: func(data, host_sizes, *others, **named), [data, *others], kwargs)


def pad_sequence(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Runs the conversion of a packed sequence to a padded one.  Its lengths are on the host."""
    output, lengths = recurrent(places, func, args, kwargs)
    if places.real != CPU and not is_traced((args, kwargs)):
        lengths = lengths.to(CPU)
    places.note(lengths, HOST)
    return output, lengths


def lstm(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Runs `torch.lstm`, and gives the states the shapes of the initial states.  On a GPU, torch before 2.13 traces them with an
    extra axis (pytorch issue 151200)."""
    output, *states = recurrent(places, func, args, kwargs)
    first = args[1] if isinstance(args[1], tuple | list) else args[2]  # with a packed sequence, args[1] has the batch sizes
    return output, *[new if new.dim() == like.dim() else new.view(like.shape) for new, like in zip(states, first, strict=True)]


def histogram(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Runs `torch.histc`.  PyTorch supports integers only on a GPU.  If the CPU runs in place of a GPU, converts integers to
    float64 and back."""
    tensor = args[0] if args else kwargs["input"]
    if places.real != CPU or places.target_device == CPU or tensor.is_floating_point():
        return operate(places, func, args, kwargs)
    floats = operate(places, torch.Tensor.double, [tensor], {})
    counts = operate(places, func, [floats, *args[1:]], {name: value for name, value in kwargs.items() if name != "input"})
    return operate(places, torch.Tensor.to, [counts, tensor.dtype], {})


def chunk(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Runs `torch.chunk`.  Supports an axis whose size depends on data, if the size is known to be a multiple of `chunks`.  torch
    (2.11, 2.13) would branch on whether the axis is empty."""
    arguments = {"dim": 0} | dict(zip(("input", "chunks", "dim"), args, strict=False)) | kwargs
    tensor, chunks, dim = arguments["input"], arguments["chunks"], arguments["dim"]
    size = tensor.shape[dim] if tensor.dim() else 0
    if not isinstance(size, torch.SymInt) or not free_unbacked_symbols(size):
        return operate(places, func, args, kwargs)
    part = size // chunks
    if not statically_known_true(part * chunks == size):
        return operate(places, func, args, kwargs)
    return operate(places, torch.split_with_sizes, [tensor, [part] * chunks, dim], {})


def deepcopied(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Copies a tensor for copy.deepcopy, which reads the memory of the original.  A traced tensor has none, so it is cloned.

    Raises RuntimeError if `memo` has another tensor in the same memory: the copies of both would share memory."""
    tensor, memo = args
    if id(tensor) in memo:
        return memo[id(tensor)]
    storage = ("storage", tensor.untyped_storage()._cdata)
    if not is_traced(tensor) and not isinstance(tensor, FunctionalTensor):
        return func(*args, **kwargs)
    if storage in memo:
        raise RuntimeError("copy.deepcopy() copies two traced tensors that share memory: copy them with clone()")
    memo[storage] = tensor
    memo[id(tensor)] = copied = operate(places, torch.Tensor.clone, [tensor], {})
    return copied


def data(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Runs `tensor.data`, which torch (2.11, 2.13) does not trace, as `detach`.  Both return a view: writes to it change the
    tensor."""
    return operate(places, torch.Tensor.detach if get_proxy_mode() is not None else func, args, kwargs)


def pack_sequence(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Runs the conversion to a packed sequence.  The data stays on the device of the input, the batch sizes on the host."""
    if places.real == CPU or is_traced((args, kwargs)):
        data, sizes = operate(places, func, args, kwargs)
    else:
        data, sizes = func(args[0], args[1].to(CPU), *args[2:], **kwargs)
        places.note(data, places.place(args[0]))
    places.note(sizes, HOST)
    return data, sizes


def _side(places: TensorPlaces, func: Any, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> str:
    sides = [places.place(tensor) for tensor in tensors]
    if func in _AT_FIRST and isinstance(args[0], torch.Tensor) and places.place(args[0]) != FREE:
        return places.place(args[0])
    if HOST not in sides:
        return FREE if sides and DEVICE not in sides else DEVICE
    return DEVICE if DEVICE in sides else HOST


def _requested_device(places: TensorPlaces, kwargs: dict[str, Any]) -> str | None:
    """Returns the place that `device=` names, or None.  Replaces this argument by the real device of the call."""
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
        places.saw("pinned-memory", "pin_memory=True has no effect: a bundle allocates its own pinned memory")
    if kwargs.get("device") is None:
        return None
    place = places.named(kwargs["device"])
    if place is not None:
        kwargs["device"] = places.real
    return place


@cache
def _constructors() -> frozenset[Any]:
    return frozenset(_device_constructors())
