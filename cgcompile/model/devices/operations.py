"""An operation of the user's code, run where its tensors are.

Where eager PyTorch runs the model on a GPU, moves are moves, and what is on the host runs on the CPU.

Private interfaces (torch 2.11, 2.13): `torch.utils._device._device_constructors`, the functions that make a tensor out of none,
and the functions of `torch._VF` for packed sequences and LSTMs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
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
"""What runs where its first tensor is."""

_CROSSING = _AT_FIRST | {torch.tensor_split, torch.Tensor.tensor_split}
"""What takes tensors of both places in PyTorch, too: copies, and indices and lengths on the host."""


def operate(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Any operation that is not one of those below."""
    wanted = None
    if isinstance(func, torch._ops.OpOverload):  # of a saved program, whose devices are those where it was exported
        args, kwargs = pytree.tree_map_only(torch.device, lambda it: it if it.type == "meta" else places.real, (args, kwargs))
    else:
        wanted = _requested_device(places, kwargs)
        if kwargs.get("device") is None and places.real != CPU and func in _constructors():
            kwargs["device"] = places.real
    tensors = tensors_in((args, kwargs))
    side = _side(places, func, args, tensors)
    elsewhere = [tensor for tensor in tensors if places.place(tensor) == _OTHER.get(side) and (tensor.dim() or side == HOST)]
    if elsewhere:
        if func not in _CROSSING:
            name = getattr(func, "__name__", func)
            places.saw("several-devices", f"{name}: expected all tensors to be on the same device, found the GPU and the CPU")
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: places.moved(tensor, side), (args, kwargs))
    return places.noted(run_at(places, func, args, kwargs, side), side, wanted)


def run_at(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any], side: str) -> Any:
    """The operation, with its tensors on the real device of `side`.  What it writes to a copy is written back."""
    if places.real == CPU:
        return called(func, args, kwargs)
    where = CPU if side == HOST and not is_traced((args, kwargs)) else places.real
    copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def there(tensor: torch.Tensor) -> torch.Tensor:
        if real_device(tensor).type in (where.type, "meta"):
            return tensor
        tensor_copy = tensor.to(where)
        copies.append((tensor, tensor_copy, tensor_copy._version))
        return tensor_copy

    args, kwargs = pytree.tree_map_only(torch.Tensor, there, (args, kwargs))
    result = called(func, args, kwargs)
    origin = {id(device_copy): tensor for tensor, device_copy, _ in copies}
    for tensor, device_copy, version in copies:
        if device_copy._version != version:
            tensor.copy_(device_copy)
    if not tensors_in(result):
        return result  # a torch.Size would become a tuple below
    return pytree.tree_map_only(torch.Tensor, lambda tensor: origin[id(tensor)] if id(tensor) in origin else there(tensor), result)


def recurrent(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A recurrent layer: the sizes of a packed sequence's batches stay on the host, where PyTorch wants them."""
    data, sizes, *more = args
    if not isinstance(sizes, torch.Tensor) or sizes.dtype != torch.int64:  # no sizes: states
        return operate(places, func, args, kwargs)
    held = sizes if places.real == CPU or is_traced((args, kwargs)) else sizes.to(CPU)
    return operate(places, lambda data, *more, **named: func(data, held, *more, **named), [data, *more], kwargs)


def pad_sequence(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The way back from a packed sequence: its lengths are on the host."""
    output, lengths = recurrent(places, func, args, kwargs)
    if places.real != CPU and not is_traced((args, kwargs)):
        lengths = lengths.to(CPU)
    places.note(lengths, HOST)
    return output, lengths


def lstm(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.lstm` with states of the initial states' shapes.  On a GPU torch before 2.13 traces them with an extra axis
    (pytorch issue 151200), and what follows would be traced wrongly."""
    output, *states = recurrent(places, func, args, kwargs)
    first = args[1] if isinstance(args[1], tuple | list) else args[2]  # packed sequences come with their lengths
    return output, *[new if new.dim() == like.dim() else new.view(like.shape) for new, like in zip(states, first, strict=True)]


def histogram(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.histc`: only a GPU counts integers, and the CPU may stand for one."""
    tensor = args[0] if args else kwargs["input"]
    if places.real != CPU or places.target_device == CPU or tensor.is_floating_point():
        return operate(places, func, args, kwargs)
    floats = operate(places, torch.Tensor.double, [tensor], {})
    counts = operate(places, func, [floats, *args[1:]], {name: value for name, value in kwargs.items() if name != "input"})
    return operate(places, torch.Tensor.to, [counts, tensor.dtype], {})


def chunk(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.chunk`, also along as many rows as data selects, where these are surely a multiple of `chunks`: it gives so many parts
    of one size.  torch (2.11, 2.13) asks whether there are rows at all."""
    arguments = {"dim": 0} | dict(zip(("input", "chunks", "dim"), args, strict=False)) | kwargs
    tensor, chunks, dim = arguments["input"], arguments["chunks"], arguments["dim"]
    size = tensor.shape[dim] if tensor.dim() else 0
    if not isinstance(size, torch.SymInt) or not free_unbacked_symbols(size):
        return operate(places, func, args, kwargs)
    part = size // chunks
    if not statically_known_true(part * chunks == size):
        return operate(places, func, args, kwargs)
    return operate(places, torch.split_with_sizes, [tensor, [part] * chunks, dim], {})


def data(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`tensor.data`, which torch (2.11, 2.13) does not trace, as the view that it is: what is written to it is written to the
    tensor."""
    return operate(places, torch.Tensor.detach if get_proxy_mode() is not None else func, args, kwargs)


def pack_sequence(places: TensorPlaces, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A packed sequence holds its data where the input is, and the sizes of its batches on the host."""
    if places.real == CPU or is_traced((args, kwargs)):
        data, sizes = operate(places, func, args, kwargs)
    else:
        data, sizes = func(args[0], args[1].to(CPU), *args[2:], **kwargs)
        places.note(data, places.place(args[0]))
    places.note(sizes, HOST)
    return data, sizes


def _side(places: TensorPlaces, func: Any, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> str:
    """Where the operation runs."""
    sides = [places.place(tensor) for tensor in tensors]
    if func in _AT_FIRST and isinstance(args[0], torch.Tensor) and places.place(args[0]) != FREE:
        return places.place(args[0])
    if HOST not in sides:
        return FREE if sides and DEVICE not in sides else DEVICE
    return DEVICE if DEVICE in sides else HOST


def _requested_device(places: TensorPlaces, kwargs: dict[str, Any]) -> str | None:
    """The place that `device=` names.  The operation itself runs where everything is."""
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
        places.saw("pinned-memory", "pin_memory=True: pinned memory of the user's is not used")
    if kwargs.get("device") is None:
        return None
    place = places.named(kwargs["device"])
    if place is not None:
        kwargs["device"] = places.real
    return place


@cache
def _constructors() -> frozenset[Any]:
    """The functions that make a tensor out of none, on the device of their argument `device`."""
    return frozenset(_device_constructors())
