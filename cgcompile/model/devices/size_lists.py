"""Tensors from a list of sizes, some of which are symbolic: `torch.tensor(x.shape)`.

Each element is known.  If Python reads one, it gets a number for a constant size, and the symbol in `x.shape` for a dynamic size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

MADE_OF_A_LIST = frozenset({torch.tensor, torch.as_tensor, torch.asarray})

READS = frozenset({torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__index__})

WHOLE = frozenset({torch.int64, torch.int32})
"""Dtypes that can hold every size."""


class SizeLists:
    """The size lists of one call.  `state` returns a value that changes when the tensor is written to."""

    def __init__(self, state: Callable[[torch.Tensor], Any]) -> None:
        self._state = state
        self._lists: Any = WeakTensorKeyDictionary()

    def of(self, tensor: Any) -> Any:
        """Returns the elements of a tensor as a list, or as a number if it has no dimensions; None for a tensor that does not come
        from sizes."""
        if not isinstance(tensor, torch.Tensor):
            return None
        state, elements = self._lists.get(tensor, (None, None))
        return elements if elements is not None and state == self._state(tensor) else None

    def note(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Records the result of an operation that creates a tensor from sizes, or selects elements of one."""
        elements: Any = None
        if func in MADE_OF_A_LIST and args and isinstance(args[0], list | tuple | torch.Size):
            elements = list(args[0])
            if not all(type(element) in (int, torch.SymInt) for element in elements) or torch.SymInt not in map(type, elements):
                return
        elif func in (torch.Tensor.__getitem__, torch.Tensor.unbind) and isinstance(source_elements := self.of(args[0]), list):
            elements = _selected(source_elements, args[1:]) if func is torch.Tensor.__getitem__ else source_elements
        if elements is None or (func is torch.Tensor.unbind and args[1:] not in ([], [0])):
            return
        pairs = zip(result, elements, strict=True) if func is torch.Tensor.unbind else [(result, elements)]
        for tensor, part in pairs:
            if isinstance(tensor, torch.Tensor) and tensor.dtype in WHOLE:
                self._lists[tensor] = self._state(tensor), part

    def read(self, func: Any, args: Sequence[Any]) -> Any:
        """Returns the numbers that Python reads from a tensor of sizes, or None for any other call."""
        if func not in READS or (elements := self.of(args[0])) is None:
            return None
        if func is torch.Tensor.tolist:
            return list(elements) if isinstance(elements, list) else elements
        return (elements[0] if len(elements) == 1 else None) if isinstance(elements, list) else elements


def _selected(elements: list[Any], index: Sequence[Any]) -> Any:
    """Returns the elements that a constant number or slice selects, or None for any other index."""
    (part,) = index
    bounds = (part.start, part.stop, part.step) if isinstance(part, slice) else (part,)
    if any(type(bound) is not int and not (bound is None and isinstance(part, slice)) for bound in bounds):
        return None
    return elements[part]
