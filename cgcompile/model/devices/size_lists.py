"""Tensors that are made of a list of sizes, some of which vary: `torch.tensor(x.shape)`.

Nothing computes with such a tensor at the build, but its elements are known one by one: where Python asks for one that is a
constant it gets a number, and for one that varies the symbol of the size, as from `x.shape` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

MADE_OF_A_LIST = frozenset({torch.tensor, torch.as_tensor, torch.asarray})

READS = frozenset({torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__index__})

WHOLE = frozenset({torch.int64, torch.int32})
"""Types that hold every size."""


class SizeLists:
    """Of one call.  `state`: what changes when a tensor is written to."""

    def __init__(self, state: Callable[[torch.Tensor], Any]) -> None:
        self._state = state
        self._lists: Any = WeakTensorKeyDictionary()

    def of(self, tensor: Any) -> Any:
        """The elements of a tensor: a list, or a number for one without dimensions; None where it is none of these tensors."""
        if not isinstance(tensor, torch.Tensor):
            return None
        state, elements = self._lists.get(tensor, (None, None))
        return elements if elements is not None and state == self._state(tensor) else None

    def note(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Notes what an operation gives that makes such a tensor, or selects elements of one."""
        elements: Any = None
        if func in MADE_OF_A_LIST and args and isinstance(args[0], list | tuple | torch.Size):
            elements = list(args[0])
            if not all(type(element) in (int, torch.SymInt) for element in elements) or torch.SymInt not in map(type, elements):
                return
        elif func in (torch.Tensor.__getitem__, torch.Tensor.unbind) and isinstance(whole := self.of(args[0]), list):
            elements = _selected(whole, args[1:]) if func is torch.Tensor.__getitem__ else whole
        if elements is None or (func is torch.Tensor.unbind and args[1:] not in ([], [0])):
            return
        pairs = zip(result, elements, strict=True) if func is torch.Tensor.unbind else [(result, elements)]
        for tensor, part in pairs:
            if isinstance(tensor, torch.Tensor) and tensor.dtype in WHOLE:
                self._lists[tensor] = self._state(tensor), part

    def read(self, func: Any, args: Sequence[Any]) -> Any:
        """What Python gets where it reads such a tensor; None where it asks for something else."""
        if func not in READS or (elements := self.of(args[0])) is None:
            return None
        if func is torch.Tensor.tolist:
            return list(elements) if isinstance(elements, list) else elements
        return (elements[0] if len(elements) == 1 else None) if isinstance(elements, list) else elements


def _selected(elements: list[Any], index: Sequence[Any]) -> Any:
    """Elements by a number or a slice of constants, None for another index."""
    (part,) = index
    bounds = (part.start, part.stop, part.step) if isinstance(part, slice) else (part,)
    if any(type(bound) is not int and not (bound is None and isinstance(part, slice)) for bound in bounds):
        return None
    return elements[part]
