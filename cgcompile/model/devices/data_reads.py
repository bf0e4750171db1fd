"""What Python learns from tensors: branches on data, and numbers that are read out."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch

from ..side_effects import BRANCH, UNFINISHED, SideEffects
from .known_values import KnownValues, is_known
from .operations import run_at
from .tensor_places import DEVICE, TensorPlaces
from .tracing import called, has_no_data, tensors_in

BRANCHES = frozenset({
    torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero, torch.equal, torch.Tensor.equal, torch.allclose,
    torch.Tensor.allclose,
})  # fmt: skip
"""What Python asks for a truth value."""

NUMBERS = frozenset({
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__,
})  # fmt: skip
"""What Python asks for numbers."""


class DataReads:
    """The branches and reads of one call, noted in the effects of `places`.

    What `values` has is no data: Python gets it.  `earlier`: what a call with real tensors did.  A traced call, whose tensors hold
    no data, branches as that one did, and gets the numbers from it that `known` names by position.
    """

    def __init__(self, places: TensorPlaces, values: KnownValues, earlier: SideEffects, known: Set[int]) -> None:
        self._places, self._values, self._effects = places, values, places.effects
        self._answers = iter(earlier.answers)
        self._reads, self._known = earlier.reads, known
        self._guess = False

    def truth(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """One of BRANCHES.  A traced call has no data to decide by: it goes where the example inputs went."""
        earlier = next(self._answers, None)
        if not any(has_no_data(tensor) for tensor in tensors_in((args, kwargs))):
            answer = bool(run_at(self._places, func, args, kwargs, DEVICE))
        elif is_known(value := self._values.result(func, args, kwargs)):
            answer = bool(value)
        else:
            self._places.saw("data-dependent-branch", BRANCH)
            self._guess = not self._guess  # beyond the answers: no loop may wait for one of the two for ever
            answer = self._guess if earlier is None else earlier
        self._effects.answers.append(answer)
        return answer

    def read(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """One of NUMBERS."""
        position = len(self._effects.reads)
        self._effects.reads.append(UNFINISHED)
        replayed = position in self._known and position < len(self._reads)
        value = self._values.result(func, args, kwargs)
        if not is_known(value):
            value = self._reads[position] if replayed else called(func, args, kwargs)
        self._effects.reads[position] = value
        return value
