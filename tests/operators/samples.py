"""The samples that PyTorch tests its operators with, grouped into modules.

Uses a private interface (torch 2.11, 2.13), `torch.testing._internal.common_methods_invocations.op_db`, which needs the package
expecttest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

SEED = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Sample number `place` of operator number `operator` in PyTorch's list."""

    operator: int
    place: int

    def __str__(self) -> str:
        return f"{self.operator}:{self.place}"

    @property
    def name(self) -> str:
        info = op_db[self.operator]
        return ".".join(filter(None, [info.name, info.variant_test_name]))


def parsed(text: str) -> Sample:
    """Parses the text of a sample."""
    operator, _, place = text.partition(":")
    return Sample(operator=int(operator), place=int(place))


def samples(dtype: torch.dtype) -> list[Sample]:
    """Returns two samples of every operator: the first one and the middle one of those that have a tensor with elements."""
    chosen = []
    for number, operator in enumerate(op_db):
        if dtype not in operator.dtypes:
            continue
        full = [
            place
            for place, sample_input in enumerate(drawn(number, dtype))
            if any(tensor.numel() for tensor in _tensors(sample_input))
        ]
        chosen += [Sample(operator=number, place=place) for place in dict.fromkeys([*full[:1], *full[len(full) // 2 :][:1]])]
    return chosen


def drawn(operator: int, dtype: torch.dtype) -> list[Any]:
    """Returns all samples of an operator; none if PyTorch cannot make them on a CPU."""
    torch.manual_seed(SEED)
    try:
        return list(op_db[operator].sample_inputs("cpu", dtype, requires_grad=False))
    except (RuntimeError, NotImplementedError, AssertionError):
        return []


def _tensors(sample_input: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(sample_input.input) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """An operator and its arguments. The leaves at positions `tensors` are inputs of the module."""

    function: Any
    leaves: Sequence[Any]
    structure: TreeSpec
    tensors: Sequence[int]


class Group(nn.Module):
    """Runs the operators and returns all tensors of their results, in order."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        remaining, outputs = iter(inputs), list[Tensor]()
        for call in self.calls:
            leaves = [next(remaining) if place in call.tensors else leaf for place, leaf in enumerate(call.leaves)]
            args, kwargs = tree_unflatten(leaves, call.structure)
            outputs += [leaf for leaf in tree_leaves(call.function(*args, **kwargs)) if isinstance(leaf, Tensor)]
        return tuple(outputs)


def group(chosen: Sequence[Sample], dtype: torch.dtype) -> tuple[Group, tuple[Tensor, ...]]:
    """Returns a module for some samples, and its inputs."""
    calls = []
    for sample in chosen:
        sample_input = drawn(sample.operator, dtype)[sample.place]
        leaves, structure = tree_flatten(((sample_input.input, *sample_input.args), sample_input.kwargs))
        tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        calls.append(Call(function=op_db[sample.operator].op, leaves=leaves, structure=structure, tensors=tensors))
    return Group(calls).eval(), tuple([call.leaves[place] for call in calls for place in call.tensors])
