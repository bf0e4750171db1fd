"""Eager PyTorch that may be told which of nearly equal elements to select."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .origins import Origins
from .selections import COMPARISONS, NONE, Selection, counted_below, selection_of

aten = torch.ops.aten

Wanted = Mapping[int, Tensor]
"""By the number of a selection, in the order of the run: int64 indices, one for each that it gives, or NONE."""


@dataclass(frozen=True, slots=True)
class Made:
    """A selection of a run.  `first`: the number of its first index among all of the run; `ranks`: indices in a row; `chosen`:
    those with which the run went on, flat; `expected`: those of eager PyTorch; `alternatives`, where they were asked for: other
    ones that would have been as good, (distance, place, index)."""

    first: int
    ranks: int
    chosen: Tensor
    expected: Tensor
    alternatives: tuple[tuple[float, int, int], ...]


class GuidedRun(TorchDispatchMode):
    """While it is entered, operators run in eager PyTorch, and selections take the `wanted` indices where these are as good.

    `floor`: the least bound of computed floats.  `explore`: whether alternatives are looked for.  Branches and loops are run here,
    so that what is in them is seen, too."""

    supports_higher_order_operators = True

    def __init__(self, wanted: Wanted, floor: float = 0.0, explore: bool = False) -> None:
        super().__init__()
        self.origins = Origins()
        self.made: list[Made] = []
        self._wanted, self._floor, self._explore = wanted, floor, explore
        self._compared: tuple[Tensor, tuple[Any, Tensor, Tensor]] | None = None
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            run = _BODIES.get(func.name())
            if run is None:
                return func(*args, **kwargs)  # what is in it is not seen
            with self:
                return run(*args, **kwargs)
        result = func(*args, **kwargs)
        selection = selection_of(func, args, kwargs, result) or self._counted(func, args, result)
        self._compared = (result, (func, args[0], args[1])) if func in COMPARISONS else None
        if selection is None:
            self.origins.follow(func, args, kwargs, result)
            return result
        return self._selected(selection, func, args, kwargs)

    def _selected(self, selection: Selection, func: Any, args: Any, kwargs: Any) -> Any:
        number, expected = len(self.made), selection.expected
        bound = max([self.origins.error(each) for each in args if isinstance(each, Tensor)])
        bound = max(bound, self._floor) if bound else 0.0
        wanted = self._wanted.get(number)
        chosen = expected
        if wanted is not None and wanted.numel() == expected.numel():
            chosen = selection.chosen(wanted.reshape(expected.shape).to(expected.device), bound)
        ranks = expected.shape[1]
        others = selection.alternatives(bound) if self._explore and bound else []
        places = tuple([(distance, row * ranks + rank, index) for distance, row, rank, index in others])
        self.made.append(Made(self._count, ranks, chosen.reshape(-1), expected.reshape(-1), places))
        numbers = torch.arange(expected.numel(), device=expected.device).reshape(expected.shape) + self._count
        self._count += expected.numel()
        result = selection.results(chosen)
        self.origins.follow(func, args, kwargs, result)
        numbers = selection.shaped(numbers)
        self.origins.write(selection.indices_of(result), torch.stack([numbers, torch.ones_like(numbers)]))
        return result

    def _counted(self, func: Any, args: Any, result: Any) -> Selection | None:
        """The selection that a sum of the comparison just before it makes."""
        if self._compared is None or func is not aten.sum.dim_IntList or args[0] is not self._compared[0]:
            return None
        axes = args[1]
        return counted_below(self._compared[1], axes[0] % args[0].dim(), result) if axes and len(axes) == 1 else None


def _branch(condition: Any, true: Callable[..., Any], false: Callable[..., Any], operands: Any = ()) -> Any:
    return _own((true if bool(condition) else false)(*operands))


def _loop(condition: Callable[..., Any], body: Callable[..., Any], carried: Any, more: Any = (), *_: Any, **__: Any) -> Any:
    carried = tuple(carried)
    while bool(condition(*carried, *more)):
        carried = tuple(body(*carried, *more))
    return _own(carried)


def _own(result: Any) -> Any:
    """Results that share no memory with what the bodies were given."""
    return tree_map_only(torch.Tensor, torch.clone, result)


_BODIES: dict[str, Callable[..., Any]] = {"cond": _branch, "while_loop": _loop}


def asked(made: list[Made], numbers: Tensor, indices: Tensor) -> dict[int, Tensor]:
    """`indices` wanted in place of the selected ones with these `numbers`, by selection; no other is wanted."""
    starts = torch.tensor([each.first for each in made])
    which = torch.searchsorted(starts, numbers.cpu(), right=True) - 1
    found: dict[int, Tensor] = {}
    for number in which.unique().tolist():
        here = which == number
        wanted = torch.full((made[number].chosen.numel(),), NONE, dtype=torch.int64)
        wanted[numbers.cpu()[here] - made[number].first] = indices.cpu()[here]
        found[number] = wanted
    return found
