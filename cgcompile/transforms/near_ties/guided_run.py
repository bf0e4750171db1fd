"""Runs eager PyTorch, and can prescribe which of several nearly equal elements an operator selects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .origins import Origins
from .selections import COMPARISONS, NONE, Selection, compared, counted_below, selection_of

aten = torch.ops.aten

Wanted = Mapping[int, Tensor]
"""Prescribed indices by the number of a selection, in the order of the run: int64, one for each selected index, or NONE."""


@dataclass(frozen=True, slots=True)
class RunSelection:
    """A selection of a run.  `first`: the number of its first index among all indices of the run.  `ranks`: indices per row.
    `chosen`: the indices that the run used, flat.  `expected`: those of eager PyTorch.  `alternatives`, if explored: other indices
    that are as good (selections.py): (distance, position in `chosen`, index).  `ties`, if requested: for each expected index, flat,
    whether it has alternatives."""

    first: int
    ranks: int
    chosen: Tensor
    expected: Tensor
    alternatives: tuple[tuple[float, int, int], ...]
    ties: Tensor | None = None


class GuidedRun(TorchDispatchMode):
    """A dispatch mode that runs operators in eager PyTorch, and uses `wanted` indices if they are as good as eager PyTorch's
    (selections.py).

    `floor`: the smallest bound of computed floats.  `explore`: whether to collect alternatives.  `ties`: whether to check if there
    are any.  The mode runs the bodies of branches and loops itself, so that it sees their operators.

    `selections`: the selections, and the comparisons of floats.  `filters`: the numbers of comparisons because of which a wanted
    index was not as good.
    """

    supports_higher_order_operators = True

    def __init__(self, wanted: Wanted, floor: float = 0.0, explore: bool = False, ties: bool = False) -> None:
        super().__init__()
        self.origins = Origins()
        self.selections: list[RunSelection] = []
        self.filters: set[int] = set()
        self._wanted, self._floor, self._explore, self._ties = wanted, floor, explore, ties
        self._compared: tuple[Tensor, tuple[Any, Tensor, Tensor]] | None = None
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            run = _BODIES.get(func.name())
            if run is None:
                return func(*args, **kwargs)  # this mode does not see the operators inside
            with self:
                return run(*args, **kwargs)
        if func not in COMPARISONS and func._can_decompose():  # a composite operator: there are rules only for its parts
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        result = func(*args, **kwargs)
        selection = selection_of(func, args, kwargs, result) or self._counted(func, args, result)
        if func in COMPARISONS and self.origins.error_of(args):
            selection = compared(args[0], args[1], result)
            result = result if selection is None else self._selected(selection, func, args, kwargs)
            self._compared = (result, (func, args[0], args[1]))
            return result
        self._compared = None
        if selection is None:
            self.origins.follow(func, args, kwargs, result)
            return result
        return self._selected(selection, func, args, kwargs)

    def _selected(self, selection: Selection, func: Any, args: Any, kwargs: Any) -> Any:
        number, expected = len(self.selections), selection.expected
        bound = self.origins.error_of(args)
        bound = max(bound, self._floor) if bound else 0.0
        wanted = self._wanted.get(number)
        chosen = expected
        if wanted is not None and wanted.numel() == expected.numel():
            wanted = wanted.reshape(expected.shape).to(expected.device)
            chosen = selection.chosen(wanted, bound)
            self._explain(selection, args[0], wanted, chosen)
        ranks = expected.shape[1]
        others = selection.alternatives(bound) if self._explore and bound else []
        places = tuple([(distance, row * ranks + rank, index) for distance, row, rank, index in others])
        ties = selection.ties(bound).reshape(-1) if self._ties else None
        self.selections.append(RunSelection(self._count, ranks, chosen.reshape(-1), expected.reshape(-1), places, ties))
        numbers = torch.arange(expected.numel(), device=expected.device).reshape(expected.shape) + self._count
        self._count += expected.numel()
        result = selection.results(chosen)
        self.origins.follow(func, args, kwargs, result)
        numbers = selection.shaped(numbers)
        ones, none = torch.ones_like(numbers), torch.full_like(numbers, -1)
        logical = selection.indices_of(result).dtype is torch.bool
        self.origins.write(selection.indices_of(result), torch.stack([none, ones, numbers] if logical else [numbers, ones, none]))
        return result

    def _explain(self, selection: Selection, operand: Tensor, wanted: Tensor, chosen: Tensor) -> None:
        """Adds to `filters` the comparisons because of which a wanted index was not as good.  If the wanted element is the smallest
        or largest of its row, a comparison excluded it.  Else a comparison kept the chosen element."""
        origins = self.origins.of(operand)
        refused = (wanted != NONE) & (chosen != wanted)
        comparisons, values = (None, None) if origins is None else (selection.rows(origins[2]), selection.rows(operand))
        if comparisons is None or values is None or not bool(refused.any()):
            return
        inside = wanted.clamp(0, comparisons.shape[1] - 1)
        least, largest = values.aminmax(dim=1, keepdim=True)
        wanted_values = values.gather(1, inside)
        excluded = (wanted_values == least) | (wanted_values == largest)
        numbers = comparisons.gather(1, torch.where(excluded, inside, chosen))[refused]
        self.filters |= {number for number in numbers.tolist() if number >= 0}

    def _counted(self, func: Any, args: Any, result: Any) -> Selection | None:
        """Returns the selection by a sum of the comparison just before it, or None."""
        if self._compared is None or func is not aten.sum.dim_IntList or args[0] is not self._compared[0]:
            return None
        axes = args[1]
        return counted_below(self._compared[1], axes[0] % args[0].dim(), result) if axes and len(axes) == 1 else None


def _branch(condition: Any, true: Callable[..., Any], false: Callable[..., Any], operands: Any = ()) -> Any:
    return _cloned((true if bool(condition) else false)(*operands))


def _loop(condition: Callable[..., Any], body: Callable[..., Any], carried: Any, additional: Any = (), *_: Any, **__: Any) -> Any:
    carried = tuple(carried)
    while bool(condition(*carried, *additional)):
        carried = tuple(body(*carried, *additional))
    return _cloned(carried)


def _cloned(result: Any) -> Any:
    """Clones results, so that they share no memory with the operands of the bodies."""
    return tree_map_only(torch.Tensor, torch.clone, result)


_BODIES: dict[str, Callable[..., Any]] = {"cond": _branch, "while_loop": _loop}


def asked(selections: Sequence[RunSelection], numbers: Tensor, indices: Tensor) -> dict[int, Tensor]:
    """Returns by selection the indices to request: `indices` for the selected indices with these `numbers`, else NONE."""
    by_number: dict[int, Tensor] = {}
    for number, mask in _by_selection(selections, numbers):
        wanted = torch.full((selections[number].chosen.numel(),), NONE, dtype=torch.int64)
        wanted[numbers[mask] - selections[number].first] = indices[mask]
        by_number[number] = wanted
    return by_number


def selected(selections: Sequence[RunSelection], numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the indices with these numbers, int64: those that the run used, and those of eager PyTorch."""
    both = torch.empty(2, len(numbers), dtype=torch.int64)
    for number, mask in _by_selection(selections, numbers):
        places = numbers[mask] - selections[number].first
        both[0, mask] = selections[number].chosen.cpu()[places].long()
        both[1, mask] = selections[number].expected.cpu()[places].long()
    return both[0], both[1]


def _by_selection(selections: Sequence[RunSelection], numbers: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields the selections that `numbers` belong to, each with a mask of its numbers."""
    starts = torch.tensor([selection.first for selection in selections])
    owners = torch.searchsorted(starts, numbers, right=True) - 1
    for number in owners.unique().tolist():
        yield number, owners == number
