"""Outputs that share memory with an input, a weight, state or another output, as eager PyTorch hands them out.

What eager PyTorch does is asked, not derived: a `reshape` copies or not, `contiguous` and `to` give the tensor itself or another.
A bundle keeps the sharing by where the output's Value lies, whatever the compiled code does with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from cgbundle.format.schema import DTYPES, Alias, IntKey, Program, Value, Weight
from cgbundle.format.spans import HOST_ONLY

from ..errors import ModelError
from ..export.exported import Look, Shared
from ..model.flat_module import PREFIX, Flat
from ..model.source import Source, all_keys, sample

if TYPE_CHECKING:
    from ..export.exported import Exported


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    output: int
    memory: str
    index: int
    name: str
    look: Look


def find_aliases(source: Source, exported: Exported, sizes: Mapping[str, tuple[int, ...]]) -> tuple[Shared, ...]:
    """What the outputs share at the sizes of every int_key; the model runs once where they share nothing.

    Raises outputs-shared where it differs between sizes, or where two outputs overlap and neither holds the other.
    """
    keys = all_keys(sizes)
    state = frozenset(name.removeprefix(PREFIX) for name in exported.state)

    def at(key: IntKey) -> list[_Found]:
        tensors = sample(source, dict(zip(sizes, key, strict=True))).tensors
        return _found(exported.flat, tensors, state, [spec.name for spec in exported.outputs])

    first = at(keys[0])
    if not first:
        return ()
    every = {key: first if key == keys[0] else at(key) for key in keys}
    whole = [(each.output, each.memory, each.index, each.name) for each in first]
    for key, found in every.items():
        if [(each.output, each.memory, each.index, each.name) for each in found] != whole:
            raise ModelError(
                "outputs-shared",
                f"{source.label}: which outputs share memory changes with the sizes ({keys[0]} and {key}): "
                f"a reshape or contiguous() copies at some of them",
            )
    return tuple(
        [
            Shared(
                output=output, memory=memory, index=index, name=name,
                looks={key: found[place].look for key, found in every.items()},
            )
            for place, (output, memory, index, name) in enumerate(whole)
        ]
    )  # fmt: skip


def manifest_aliases(exported: Exported, weights: Sequence[Weight]) -> tuple[Alias, ...]:
    """The manifest's rows."""
    return tuple(
        [Alias(output=each.output, memory=each.memory, index=_index(each, weights)) for each in exported.aliases]
    )  # fmt: skip


def with_aliases(programs: tuple[Program, ...], exported: Exported, weights: Sequence[Weight]) -> tuple[Program, ...]:
    """The programs with the Values of outputs that share memory where the other one lies: on the cpu target in bytes from its first
    element, in a GPU's bundle in its memory.  Raises outputs-shared where the compiled code lays the other one out otherwise than
    eager PyTorch."""
    return tuple([_placed(program, exported, weights) for program in programs]) if exported.aliases else programs


def _placed(program: Program, exported: Exported, weights: Sequence[Weight]) -> Program:
    values, outputs = list(program.values), list(program.outputs)
    for each in exported.aliases:
        look, own = each.looks[program.key], values[program.outputs[each.output]]
        memory, offset, strides = _home(each, program, weights)
        name = exported.outputs[each.output].name
        if not _alike(strides, look.base, each, program, weights):
            raise ModelError(
                "outputs-shared",
                f"output {name!r}, int_key {program.key}: in eager PyTorch it shares memory with a tensor that the compiled "
                f"code lays out otherwise",
            )
        if own.memory == "host":
            values[program.outputs[each.output]] = replace(own, offset=look.offset, strides=look.strides)
            continue
        values.append(replace(own, memory=memory, offset=offset + look.offset, strides=look.strides))
        outputs[each.output] = len(values) - 1
    return replace(program, values=tuple(values), outputs=tuple(outputs))


def _index(each: Shared, weights: Sequence[Weight]) -> int:
    return next(i for i, row in enumerate(weights) if row.name == each.name) if each.name else each.index


def _home(each: Shared, program: Program, weights: Sequence[Weight]) -> tuple[str, int, tuple[int, ...]]:
    """Memory, offset and strides of what an output shares memory with."""
    if each.name:
        row = weights[_index(each, weights)]
        if row.offset == HOST_ONLY:
            raise ModelError("outputs-shared", f"an output shares memory with the weight {row.name!r}, which only the host has")
        return row.memory, row.offset, row.strides
    value: Value = program.values[(program.inputs if each.memory == "inputs" else program.outputs)[each.index]]
    return value.memory, value.offset, value.strides


def _alike(strides: Sequence[int], base: Sequence[int], each: Shared, program: Program, weights: Sequence[Weight]) -> bool:
    """Whether two layouts of one shape put every element in the same place."""
    if each.name:
        shape: Sequence[int] = weights[_index(each, weights)].shape
    else:
        shape = program.values[(program.inputs if each.memory == "inputs" else program.outputs)[each.index]].shape
    return all(mine == theirs or size < 2 for mine, theirs, size in zip(strides, base, shape, strict=True))


def _found(flat: Flat, tensors: Sequence[torch.Tensor], state: frozenset[str], names: Sequence[str]) -> list[_Found]:
    """What the outputs of a run share, in the order of the outputs."""
    given = tuple([tensor.clone() for tensor in tensors])
    homes: dict[int, tuple[str, int, str, torch.Tensor]] = {}
    for name, weight in (*flat.model.named_parameters(), *flat.model.named_buffers()):
        homes.setdefault(_home_of(weight), ("state" if name in state else "weights", 0, name, weight))
    for index, tensor in enumerate(given):
        homes[_home_of(tensor)] = ("inputs", index, "", tensor)
    homes.pop(0, None)
    try:
        with torch.no_grad():
            outputs: tuple[torch.Tensor, ...] = flat(*given)
        found = {}
        for index, output in enumerate(outputs):
            home = homes.get(_home_of(output)) if output.numel() else None
            if home is not None:
                _check_dtype(names[index], output, home[3])
                found[index] = _Found(output=index, memory=home[0], index=home[1], name=home[2], look=_look(output, home[3]))
        found |= _among(outputs, [index for index in range(len(outputs)) if index not in found], names)
    finally:
        flat.kept.restore()
    return [found[index] for index in sorted(found)]


def _among(outputs: Sequence[torch.Tensor], loose: Iterable[int], names: Sequence[str]) -> dict[int, _Found]:
    """Outputs that share elements with another: the one with the most bytes is the other."""
    groups: dict[int, list[int]] = {}
    for index in loose:
        if outputs[index].numel():
            group = groups.setdefault(_home_of(outputs[index]), [])
            if group:
                _check_dtype(names[index], outputs[index], outputs[group[0]])
            group.append(index)
    found: dict[int, _Found] = {}
    for group in groups.values():
        ordered = sorted(group, key=lambda index: (-_span(outputs[index]), index))
        for place, index in enumerate(ordered):
            for base in ordered[:place]:
                if base in found or not _overlap(outputs[base], outputs[index]):
                    continue
                if not _inside(outputs[index], outputs[base]):
                    raise ModelError(
                        "outputs-shared", f"outputs {names[base]!r} and {names[index]!r} overlap, and neither holds the other"
                    )
                found[index] = _Found(
                    output=index, memory="outputs", index=base, name="", look=_look(outputs[index], outputs[base])
                )
                break
    return found


def _check_dtype(name: str, output: torch.Tensor, other: torch.Tensor) -> None:
    """Raises outputs-shared for the same memory seen as another dtype (`view(dtype)`, `view_as_real`)."""
    if output.dtype != other.dtype:
        raise ModelError(
            "outputs-shared", f"output {name!r} sees memory as {output.dtype} that it shares with a tensor of {other.dtype}"
        )


def _home_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0


def _look(tensor: torch.Tensor, base: torch.Tensor) -> Look:
    size = DTYPES[str(base.dtype).removeprefix("torch.")]
    offset = (tensor.storage_offset() - base.storage_offset()) * size
    return Look(offset=offset, strides=tensor.stride(), base=base.stride())


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to behind the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _inside(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    begin = tensor.storage_offset() - base.storage_offset()
    return begin >= 0 and begin + _span(tensor) <= _span(base)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common, found by marking: chunks of a tensor have none."""
    begin = min(one.storage_offset(), other.storage_offset())
    end = max(each.storage_offset() + _span(each) for each in (one, other))
    marks = torch.zeros(end - begin, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset() - begin).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - begin).any())
