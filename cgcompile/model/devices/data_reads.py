"""Values of tensors that Python reads: truth values for branches, and numbers."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from cgbundle.cpu.host_region import ASSERTS

from ..side_effects import ASSERTED, BRANCH, UNFINISHED, Asserted, SideEffects
from ..tracing.predicates import EQUAL, differ_in_shape
from ..user_code import here
from .known_values import KnownValues, is_known
from .operations import run_at
from .tensor_places import CPU, DEVICE, HOST, TensorPlaces
from .tracing import called, has_no_data, tensors_in

BRANCHES = frozenset({
    torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero, torch.equal, torch.Tensor.equal, torch.allclose,
    torch.Tensor.allclose,
})  # fmt: skip
"""Functions that return a truth value to Python."""

ONE_TENSOR = frozenset({torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero})
"""Functions of BRANCHES that test a single element."""

NUMBERS = frozenset({
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__,
})  # fmt: skip
"""Functions that return numbers to Python."""


SIZES = frozenset({torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.numel})
"""Functions that return sizes to Python."""


class DataReads:
    """The branches and reads of one call.  Records them in the effects of `places`.

    `values` has the tensors with a known value, which does not depend on data.  `earlier` has the effects of an earlier call with
    real tensors.  The tensors of a traced call hold no data.  So a traced call takes the answers of its branches from `earlier`,
    and also the numbers at the positions in `known`.  At the positions in `asserted`, the program asserts that every call has the
    same value.
    """

    def __init__(
        self, places: TensorPlaces, values: KnownValues, earlier: SideEffects, known: Set[int], asserted: Asserted
    ) -> None:
        self._places, self._values, self._effects = places, values, places.effects
        self._answers = iter(earlier.answers)
        self._reads, self._known, self._asserted = earlier.reads, known, asserted
        self._guess = False

    def truth(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """Returns the value of a function of BRANCHES.  A traced call has no data, and takes the branch of the example inputs."""
        example_answer = next(self._answers, None)
        if not any(has_no_data(tensor) for tensor in tensors_in((args, kwargs))):
            answer = bool(run_at(self._places, func, args, kwargs, DEVICE))
        elif is_known(value := self._values.result(func, args, kwargs)):
            answer = bool(value)
        elif func in EQUAL and differ_in_shape(*args):
            answer = False
        else:
            position = len(self._effects.answers)
            if func in ONE_TENSOR:
                self._effects.guessed.add(position)
            self._guess = not self._guess  # the earlier call had fewer branches: alternate, so that a loop ends
            answer = self._guess if example_answer is None else example_answer
            if position in self._asserted.answers:
                self._assert(args[0], answer)
            else:
                self._places.saw("data-dependent-branch", BRANCH)
        self._effects.answers.append(answer)
        return answer

    def read(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the value of a function of NUMBERS."""
        position = len(self._effects.reads)
        self._effects.reads.append(UNFINISHED)
        if func is not torch.Tensor.tolist and not (args[0].is_floating_point() or args[0].is_complex()):
            self._effects.whole.add(position)
        replayed = position in self._known and position < len(self._reads)
        value = self._values.result(func, args, kwargs)
        if not is_known(value):
            value = self._reads[position] if replayed else called(func, args, kwargs)
            if replayed and position in self._asserted.reads:
                self._assert(args[0], value)
        # tolist() of a traced tensor reads each number separately
        self._effects.reads[position:] = tree_leaves(value) if func is torch.Tensor.tolist else [value]
        return value

    def read_sizes(self, sizes: Any) -> Any:
        """Returns the result of a function of SIZES to Python, here unchanged.  Subclasses record which sizes depend on data."""
        return sizes

    def _assert(self, tensor: torch.Tensor, value: bool | int) -> None:
        """Adds an assertion to the graph that `tensor`, of one element, equals `value`.  It runs on the host: a failed assertion on
        a GPU makes the GPU unusable for the process."""
        places = self._places
        places.saw("asserted-value", ASSERTED)
        where, line = here()
        same = (tensor != 0) if isinstance(value, bool) else tensor == value
        same = same.reshape(()) if value is not False else same.reshape(()).logical_not()
        if places.target_device != CPU:
            same = places.moved(places.noted(same, places.place(tensor)), HOST)
        called(torch.ops.aten._assert_async.msg, [same, f"{where}: {ASSERTS}: the bundle needs the value {value} here: {line}"], {})
