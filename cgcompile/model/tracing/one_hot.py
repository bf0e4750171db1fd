"""Supports `one_hot(index, max(classes, n))[..., :n]` with a tensor `classes`.  Expert routers use it to ignore large indices.

The number of columns of `one_hot` depends on data.  The number of selected columns does not, because there are at least `n`.  While
torch exports a model, `max` of a tensor and a number is `torch.clamp` (torch 2.11, 2.13).

Private interfaces (torch 2.11, 2.13): `torch._C._nn.one_hot`, which is `torch.nn.functional.one_hot`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

ONE_HOT = frozenset({F.one_hot, torch._C._nn.one_hot})

CLAMPS = frozenset({torch.clamp, torch.Tensor.clamp, torch.clamp_min, torch.Tensor.clamp_min})

METHODS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "and", "or", "xor", "invert", "neg",
    "eq", "ne", "lt", "le", "gt", "ge", "len", "iter", "bool", "float", "int", "setitem",
)  # fmt: skip
"""Special methods, which Python looks up in the class of an operand."""


class OpenOneHots:
    """The calls of `one_hot` in one traced call of the model, and the lower bounds of clamped tensors."""

    def __init__(self) -> None:
        self._least: Any = WeakTensorKeyDictionary()

    def clamped(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Records the lower bound of the `result` of a clamp."""
        if func not in CLAMPS:
            return
        minimum = kwargs.get("min", args[1] if len(args) > 1 else None)
        maximum = kwargs.get("max", args[2] if len(args) > 2 else None)
        if type(minimum) is int and maximum is None and isinstance(result, torch.Tensor):
            self._least[result] = result._version, minimum

    def opened(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpenOneHot | None:
        """Returns an OpenOneHot if the number of classes was clamped; None for any other call."""
        if func not in ONE_HOT:
            return None
        index, classes = [*args, *[kwargs[name] for name in ("input", "num_classes") if name in kwargs], None][:2]
        if not isinstance(index, torch.Tensor) or not isinstance(classes, torch.Tensor):
            return None
        version, minimum = self._least.get(classes, (None, None))
        if minimum is None or version != classes._version:
            return None

        def full_encoding() -> torch.Tensor:
            self._least.pop(classes, None)  # so that the call below runs in torch
            encoding: torch.Tensor = func(index, classes)
            return encoding

        return OpenOneHot(index, classes, minimum, full_encoding)


class OpenOneHot:
    """Rows of `one_hot` whose columns are not computed yet.  `whole` computes all of them, or raises torch's error."""

    def __init__(self, index: torch.Tensor, classes: torch.Tensor, least: int, whole: Callable[[], torch.Tensor]) -> None:
        self._index, self._classes, self._least, self._whole = index, classes, least, whole

    def __getitem__(self, key: Any) -> torch.Tensor:
        if isinstance(key, tuple) and len(key) == 2 and key[0] is ... and isinstance(key[1], slice):
            columns = key[1].stop
            from_first = key[1].start in (None, 0) and key[1].step in (None, 1)
            if from_first and type(columns) is int and 0 < columns <= self._least:
                return self._first(columns)
        return self._whole()[key]

    def _first(self, columns: int) -> torch.Tensor:
        """Returns the first columns, int64.  An index that is not below `classes` becomes -1, so that it fails as in `one_hot`."""
        index = torch.where(self._index < self._classes, self._index.clamp(max=columns), -1)
        return F.one_hot(index, columns + 1)[..., :columns]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        all_args, all_kwargs = tree_map_only(cls, lambda rows: rows._whole(), (tuple(args), dict(kwargs or {})))
        return func(*all_args, **all_kwargs)


def _of_whole(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._whole(), name)(*args)


for _name in METHODS:
    setattr(OpenOneHot, f"__{_name}__", _of_whole(f"__{_name}__"))
