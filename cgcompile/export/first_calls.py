"""Calls the model in eager PyTorch before torch.export, and finds side effects: changed attributes, buffers and random numbers.

It calls the model at the smallest and largest sizes, then twice more at the smallest: the first calls may fill caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import ModelError
from ..model.flat_module import FlatModule, held_weights, unwatched
from ..model.nondeterminism.generators import Generator, generators, states
from ..model.nondeterminism.repeated_calls import (
    Observed,
    Results,
    called_again,
    observed,
    outside_effects,
    outside_values,
    results,
)  # fmt: skip
from ..model.side_effects import Obstacle, SideEffects
from ..model.source import OTHER_SEED, Source, sample
from ..model.tracing.attributes import assignment_place, changed, holder_of, marks, own_attributes, same_nesting
from ..model.tracing.constant_expressions import version_of
from ..model.tracing.held_tensors import Held, also_buffer, held_tensors, make_attribute, make_buffer
from ..util.raw_bytes import copied, same_bits
from .exported import EagerShapes
from .signature.eager_check import try_eager

COMPARED = 1 << 24
"""A weight with more elements is not copied to detect whether a call changes it."""

Counter = tuple[Obstacle, Any]
"""The obstacle for an attribute that counts calls, and its value before the first call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstCalls:
    """The side effects of the first calls.

    `calls`: the calls at the smallest and the largest sizes.  `shapes`: the shapes of their outputs.  `changes`: by name,
    attributes that every call changes.  `counters`: by name, changed numbers and tensors that became buffers.  `holding`: name of
    another changed attribute -> buffers added for its tensors, to test whether a result depends on them.  `outside`: obstacles from
    outside the model (random numbers, time).  `notes`: what a call does outside of the model.  `written`: names of parameters and
    buffers that a call wrote to.  `first` and `second`: results of two more calls at the smallest sizes.
    """

    calls: tuple[SideEffects, ...]
    shapes: tuple[EagerShapes, ...]
    changes: Mapping[str, Obstacle]
    counters: Mapping[str, Counter]
    holding: Mapping[str, tuple[str, ...]]
    outside: tuple[Obstacle, ...]
    notes: tuple[Obstacle, ...]
    written: frozenset[str]
    first: Results
    second: Observed


def first_calls(source: Source, flat: FlatModule, sizes: Mapping[str, tuple[int, ...]]) -> FirstCalls:
    """Calls the model.  Tensors that it writes to become buffers.  Sets `flat.earlier` to the call at the smallest sizes.

    Raises size-excluded, eager-failed, structure-unsupported.
    """
    calls: list[SideEffects] = []
    flat.watch = calls.append
    fresh = own_attributes(source.model)
    before = states(generators(source.model, source.entry))
    shapes = _fill_caches(source, flat, sizes, calls)
    versions = {id(weight.tensor): version_of(weight.tensor) for weight in held_weights(source.model)}
    drawn_from = generators(source.model, source.entry)  # again, since a call may have imported NumPy
    after = states(drawn_from)
    flat.earlier = calls[0]
    flat.watch = unwatched
    changes, counters, holding, first, second = _changed_attributes(source, flat, sizes, drawn_from, fresh)
    outside = outside_values(flat, sample_at(source, sizes, 0), first, second)
    if after != before and not second.moved:  # only other sizes, or inputs(), drew random numbers
        largest = sample_at(source, sizes, -1)
        outside += outside_values(flat, largest, (), replace(observed(flat, largest, drawn_from, after), reads=()))
    return FirstCalls(
        calls=tuple(calls), shapes=tuple(shapes), changes=changes, counters=counters, holding=holding, outside=outside,
        notes=outside_effects(flat, sample_at(source, sizes, 0), second), written=_changed_weights(source.model, versions),
        first=first, second=second,
    )  # fmt: skip


def _fill_caches(
    source: Source, flat: FlatModule, sizes: Mapping[str, tuple[int, ...]], calls: list[SideEffects]
) -> list[EagerShapes]:
    """Calls the model at its smallest and largest sizes, and restores all buffers except caches.

    A buffer is a cache if calls with other inputs write the same values to it, and if calls also change attributes.  An attribute
    may record that the cache is filled, so the cache keeps its contents.

    Raises size-excluded, eager-failed, structure-unsupported.
    """
    before = marks(source.model)
    try:
        shapes = try_eager(source, flat, sizes, keep=True)
    except ModelError as error:
        if not flat.snapshot.changed():
            raise
        calls.clear()
        if error.code != "state-changed":
            flat.snapshot.restore()  # the call may have failed because a buffer was full
            return try_eager(source, flat, sizes)
        buffer_names = flat.snapshot.changed()
        flat.follow_buffers()  # the first call may have given a buffer its shape
        flat.reshaped = error.where, str(error).removeprefix(f"{error.where}: ")
        try:
            return try_eager(source, flat, sizes)
        except ModelError as again:
            if again.code != "state-changed":
                raise
        calls.clear()
        for name in buffer_names:  # a call creates the tensor again for every size, so it becomes a plain attribute
            owner, leaf = source.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            if leaf in owner._non_persistent_buffers_set:
                make_attribute(source.model, name, source.model.get_buffer(name))
        flat.follow_buffers()
        return try_eager(source, flat, sizes)
    written = flat.snapshot.changed()
    if written and not changed(before, marks(source.model)):
        flat.snapshot.restore()
    elif written:
        filled = flat.snapshot.current()
        watch, flat.watch = flat.watch, unwatched
        try:
            try_eager(source, flat, sizes, OTHER_SEED, keep=True)
        except ModelError:
            written = []
        flat.watch = watch
        refilled = flat.snapshot.current()
        flat.snapshot.restore(but=[name for name in written if same_bits(refilled[name], filled[name])])
        flat.follow_buffers()
    return shapes


def sample_at(source: Source, sizes: Mapping[str, tuple[int, ...]], pick: int) -> tuple[torch.Tensor, ...]:
    """Returns the sample inputs at the smallest sizes (`pick` = 0) or the largest (-1)."""
    return sample(source, {name: values[pick] for name, values in sizes.items()}).tensors


def _changed_weights(model: torch.nn.Module, versions: Mapping[int, int | None]) -> frozenset[str]:
    """Returns names of parameters and buffers that were replaced or written to.  `versions`: id of a tensor -> version before."""
    nothing = object()
    weights = held_weights(model)
    return frozenset([weight.name for weight in weights if versions.get(id(weight.tensor), nothing) != version_of(weight.tensor)])


def changed_weights(flat: FlatModule, tensors: Sequence[torch.Tensor], names: Set[str]) -> frozenset[str]:
    """Returns those of the named weights whose contents differ after a call with `tensors`.  Compares the contents of weights with
    at most COMPARED elements, since some writes do not change the version counter."""
    small = [weight for weight in held_weights(flat.model) if weight.name in names and weight.tensor.numel() <= COMPARED]
    weights = [(weight, copied(weight.tensor)) for weight in small]
    if not weights:
        return frozenset()
    watch, flat.watch = flat.watch, unwatched
    called_again(flat, tensors, keep=True)
    flat.watch = watch
    changed_names = frozenset([weight.name for weight, before in weights if not same_bits(weight.tensor, before)])
    flat.snapshot.restore()
    return changed_names


def _changed_attributes(
    source: Source,
    flat: FlatModule,
    sizes: Mapping[str, tuple[int, ...]],
    drawn_from: Sequence[Generator],
    fresh: Mapping[str, Any],
) -> tuple[dict[str, Obstacle], dict[str, Counter], dict[str, tuple[str, ...]], Results, Observed]:
    """Calls the model twice, and finds the attributes that still change after earlier calls filled caches.  Counters, and tensors
    that a call writes to, become buffers.  `fresh`: the attributes before the first call.  Returns `changes`, `counters`,
    `holding`, `first` and `second` as in FirstCalls."""
    tensors = sample_at(source, sizes, 0)
    first = results(flat, tensors)
    tensor_versions = {id(slot.tensor): (slot, slot.tensor._version) for slot in reversed(held_tensors(source.model))}
    before = marks(source.model, tensor_versions.keys())
    second = observed(flat, tensors, drawn_from)
    after = marks(source.model, tensor_versions.keys())
    names = changed(before, after)
    buffers = {id(tensor) for tensor in source.model.buffers()}
    for slot, version in tensor_versions.values():
        if slot.tensor._version != version and id(slot.tensor) not in buffers:
            make_buffer(slot)
    places = {name: assignment_place(source.model, name) for name in names}
    changes = {
        name: Obstacle(rule="mutated-attribute", message=f"forward() changes {name!r}", where=where, source=line)
        for name, (where, line) in places.items()
    }
    registered = {id(module) for module in source.model.modules()}  # torch.export ignores buffers of other modules
    counters: dict[str, Counter] = {}
    holding: dict[str, tuple[str, ...]] = {}
    for name in _read_first(flat, tensors, [name for name in names if name in before]):
        path, _, leaf = name.rpartition(".")
        module = holder_of(source.model, path)
        value = number_or_tensor(fresh[name], own_attributes(source.model)[name]) if name in fresh else None
        if id(module) not in registered:
            continue
        if value is not None:
            make_buffer(Held(module=module, path=leaf, holder=vars(module), key=leaf, tensor=value.to(source.device)))
            counters[name] = changes.pop(name), fresh[name]
        elif same_nesting(before[name], after[name]):
            slots = [
                tensor for tensor in held_tensors(source.model) if tensor.module is module and tensor.path.partition(".")[0] == leaf
            ]
            holding[name] = tuple([f"{path}.{also_buffer(slot)}" if path else also_buffer(slot) for slot in slots])
    flat.follow_buffers()
    return changes, counters, {name: names for name, names in holding.items() if names}, first, second


def _read_first(flat: FlatModule, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> list[str]:
    """Returns those of the named attributes that a call reads before it assigns them."""
    if not names:
        return []
    effects: list[SideEffects] = []
    before, flat.assigned, flat.watch = flat.assigned, tuple(names), effects.append
    results(flat, tensors)
    flat.assigned, flat.watch = before, unwatched
    return [name for name in names if name in effects[0].early]


def number_or_tensor(first: Any, now: Any) -> torch.Tensor | None:
    """Returns the initial value of a buffer that replaces an attribute, which was `first` before the first call and is `now`.
    Returns None unless both are numbers of one type, or tensors of one shape and dtype."""
    if type(first) in (int, float) and type(now) is type(first):
        return torch.tensor(first, dtype=torch.int64 if type(first) is int else torch.float64)
    plain = type(first) is torch.Tensor and type(now) is torch.Tensor and first.layout is torch.strided
    if plain and (first.shape, first.dtype, first.device) == (now.shape, now.dtype, now.device):
        return first.detach().clone()
    return None
