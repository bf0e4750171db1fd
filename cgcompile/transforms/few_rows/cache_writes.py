"""A cache into which one place's keys or values are put, before it is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from .places import Place, on, place_of, viewed
from .products import shape_of

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """`put` is an index_put of `values` at one place, `index`, of a cache."""

    put: Node
    cache: Node
    index: Node
    values: Node


def write_into(place: Place) -> Write | None:
    """What is put at one place of a cache, if nothing but the reader of `place` reads it then; None: the cache is read as it is."""
    put = place.base
    if put.target is not aten.index_put.default or len(put.args) > 3 or put.kwargs:
        return None
    cache, indices, values = put.args
    index_tensors = [index for index in indices if index is not None]
    read_twice = [node for node in (put, *place.chain) if sum(user.target is not aten.copy_.default for user in node.users) > 1]
    if cache.op != "placeholder" or len(index_tensors) != 1 or shape_of(index_tensors[0]) != (1,) or read_twice:
        return None
    if any(put < user and user.target is not aten.copy_.default for user in cache.users):
        return None  # what reads the cache as it was would need a copy of it
    return Write(put=put, cache=cache, index=index_tensors[0], values=values)


def axis_of(write: Write) -> int:
    """The cache's axis of places."""
    return [index is not None for index in write.put.args[1]].index(True)


def values_of(write: Write, place: Place) -> Place | None:
    """Where the values lie that are put at any place of a cache, which is read at `place`: strides of 0 along its places."""
    values, cache, axis = place_of(write.values), write.cache.meta["val"], axis_of(write)
    if values is None or cache.shape[axis] == 1 or len(values.shape) != cache.dim() or values.shape[axis] != 1:
        return None
    if any(size not in (1, whole) for size, whole in zip(values.shape, cache.shape, strict=True)):
        return None
    base = values.base.meta["val"]
    memory = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    value_place = viewed(on(place, values.base), memory.as_strided(values.shape, values.strides, values.offset).expand(cache.shape))
    return value_place if value_place is not None and value_place.shape == place.shape else None
