"""Writes of one position's keys or values into a cache that attention reads afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from .places import Place, on, place_of, viewed
from .products import shape_of

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """An index_put of `values` at one position, `index`, of a cache."""

    put: Node
    cache: Node
    index: Node
    values: Node


def write_into(place: Place) -> Write | None:
    """Returns the write of one position into a cache.  Returns None for other writes, or if the result has several readers."""
    put = place.base
    if put.target is not aten.index_put.default or len(put.args) > 3 or put.kwargs:
        return None
    cache, indices, values = put.args
    index_tensors = [index for index in indices if index is not None]
    read_twice = [node for node in (put, *place.chain) if sum(user.target is not aten.copy_.default for user in node.users) > 1]
    if cache.op != "placeholder" or len(index_tensors) != 1 or shape_of(index_tensors[0]) != (1,) or read_twice:
        return None
    if any(put < user and user.target is not aten.copy_.default for user in cache.users):
        return None  # a reader of the cache before the write would need a copy of it
    return Write(put=put, cache=cache, index=index_tensors[0], values=values)


def axis_of(write: Write) -> int:
    """Returns the cache's axis of positions."""
    return [index is not None for index in write.put.args[1]].index(True)


def values_of(write: Write, place: Place) -> Place | None:
    """Returns the memory of the values that are put into a cache, viewed like `place`, with stride 0 along the positions."""
    values, cache, axis = place_of(write.values), write.cache.meta["val"], axis_of(write)
    if values is None or cache.shape[axis] == 1 or len(values.shape) != cache.dim() or values.shape[axis] != 1:
        return None
    if any(size not in (1, full) for size, full in zip(values.shape, cache.shape, strict=True)):
        return None
    base = values.base.meta["val"]
    memory = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    value_place = viewed(on(place, values.base), memory.as_strided(values.shape, values.strides, values.offset).expand(cache.shape))
    return value_place if value_place is not None and value_place.shape == place.shape else None
