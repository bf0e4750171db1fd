"""Tensors of a traced call whose values are known, since no input, parameter or buffer that may change is among what they are made
of.

A model makes positions, grids and masks of ones from sizes, and asks them: how long, how many, where.  In eager PyTorch these are
tensors like others; a trace knows of no tensor what it holds, and stops.  So whatever is made of constants alone is computed beside
the trace, and Python gets the values that it asks for.  They hold for every call of these sizes, because nothing else went in.

A value counts as long as the tensor's version is that at which it was noted: a write of anything else to it, or to a tensor that
shares its memory, changes that.

Private interfaces (torch 2.11, 2.13): `torch.utils._python_dispatch._disable_current_modes`, `torch.utils._device`'s constructors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from .tracing import called, tensors_in

LARGEST = 1 << 16
"""Elements of a value: masks and positions of short sequences, no weights."""

MADE_OF_NUMBERS = frozenset({
    torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.linspace, torch.tensor, torch.as_tensor, torch.tril_indices,
    torch.triu_indices, torch.scalar_tensor, torch.hann_window, torch.logspace,
})  # fmt: skip
"""What makes tensors of numbers alone."""

OF_ONE_NUMBER: Mapping[Any, float | None] = {
    torch.zeros_like: 0, torch.ones_like: 1, torch.full_like: None, torch.Tensor.new_zeros: 0, torch.Tensor.new_ones: 1,
    torch.Tensor.new_full: None,
}  # fmt: skip
"""What takes nothing but sizes from its first tensor, with the number that it is filled with; None: the last argument."""

SIZED = frozenset({
    F.interpolate, F.pad, torch.multinomial, torch.Tensor.multinomial, torch.Tensor.new_zeros, torch.Tensor.new_ones,
    torch.Tensor.new_full, torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.expand, torch.Tensor.repeat, torch.reshape,
    torch.narrow, torch.Tensor.narrow, torch.topk, torch.Tensor.topk, torch.Tensor.unfold, torch.roll, torch.split,
    torch.Tensor.split,
})  # fmt: skip
"""What takes numbers, or tensors of one element that stand for numbers, for all arguments but the first."""

MOVES = frozenset({torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.pin_memory})
"""What changes nothing but the place: a value is where the model is."""

INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})

_COUNTED = ("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "repeat_interleave", "histc")
COUNTED = frozenset(
    {getattr(owner, name) for owner in (torch, torch.Tensor) for name in _COUNTED if hasattr(owner, name)}
    | {torch._unique2, torch.where, torch.Tensor.__getitem__}
)
"""What may give a tensor whose size depends on what its arguments hold."""

_ARGUMENTS = (int, float, complex, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(...))
_UNKNOWN = object()


class _Drawn(RuntimeError):
    """A value would be random."""


class _NoDraws(TorchDispatchMode):
    """Raises before a random number is drawn."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _Drawn
        return func(*args, **(kwargs or {}))


@contextmanager
def _plain() -> Iterator[None]:
    """Meanwhile nothing is traced, and no mode (of the user's, too) changes what an operation does."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class KnownValues:
    """Of one call, whose tensors are on the device `real`; nothing is known of a call that is not traced."""

    def __init__(self, real: torch.device) -> None:
        self._real = real
        self._values: Any = WeakTensorKeyDictionary()

    def hold(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """A traced tensor stands for `value` in every call: a constant of the model's."""
        if isinstance(tensor, FakeTensor):
            self._values[tensor] = tensor._version, value

    def result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operation gives, a number or a truth value too; `is_known` is False of it where an argument is not known."""
        missing = False

        def value(leaf: Any) -> Any:
            nonlocal missing
            found = self._of(leaf)
            missing = missing or found is _UNKNOWN
            return found

        if get_proxy_mode() is None:
            return _UNKNOWN
        given, named = pytree.tree_map(value, (list(args), {name: each for name, each in kwargs.items() if name != "pin_memory"}))
        if missing:
            return _UNKNOWN
        if func in MOVES:
            return given[0]
        if func in MADE_OF_NUMBERS or "device" in named:
            named["device"] = self._real
        if func is torch.Tensor.to:
            given = [self._real if isinstance(each, str) else each for each in given]
        try:
            with _plain(), _NoDraws(), torch.no_grad():
                return func(*given, **named)
        except _Drawn:
            return _UNKNOWN

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the value of a tensor is known."""
        return self._of(tensor) is not _UNKNOWN

    def _of(self, leaf: Any) -> Any:
        """The value of an argument."""
        if isinstance(leaf, FakeTensor):
            version, value = self._values.get(leaf, (None, None))
            return value if version == leaf._version else _UNKNOWN
        if isinstance(leaf, torch.Tensor):
            # a constant of the model's: parameters and buffers are fake while they are traced
            if type(leaf) is not torch.Tensor or leaf.numel() > LARGEST:
                return _UNKNOWN
            with _plain():
                return leaf.clone()
        if isinstance(leaf, slice):
            parts = [self._of(part) for part in (leaf.start, leaf.stop, leaf.step)]
            return _UNKNOWN if _UNKNOWN in parts or any(isinstance(part, torch.Tensor) for part in parts) else leaf
        if isinstance(leaf, torch.device):
            return self._real if leaf.type != "meta" else _UNKNOWN
        return (
            leaf
            if isinstance(leaf, _ARGUMENTS) and not isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)
            else _UNKNOWN
        )

    def with_numbers(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, with numbers for known tensors of one element where the operation wants numbers."""
        if get_proxy_mode() is None:
            return args, kwargs
        if func in MADE_OF_NUMBERS:
            return pytree.tree_map(self._number, (args, kwargs))
        if func in SIZED:
            return [*args[:1], *pytree.tree_map(self._number, args[1:])], pytree.tree_map(self._number, kwargs)
        if func in INDEXING:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            made = tuple([self._slice(each) if isinstance(each, slice) else each for each in index])
            return [args[0], made if isinstance(args[1], tuple) else made[0], *args[2:]], kwargs
        return args, kwargs

    def _number(self, leaf: Any) -> Any:
        value = self._of(leaf) if isinstance(leaf, torch.Tensor) and leaf.dim() == 0 else _UNKNOWN
        return value.item() if isinstance(value, torch.Tensor) else leaf

    def _slice(self, each: slice) -> slice:
        return slice(self._number(each.start), self._number(each.stop), self._number(each.step))

    @contextmanager
    def noting(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[list[Any]]:
        """Around an operation that is traced: what it gives is put into the list, and noted with its value."""
        made: list[Any] = []
        if get_proxy_mode() is None:
            yield made
            return
        given = [(tensor, tensor._version) for tensor in tensors_in((args, kwargs))]
        yield made
        outputs = tensors_in(made)
        if func is torch.Tensor.__setitem__:
            outputs = [args[0]]
        written = [tensor for tensor, version in given if tensor._version != version]
        if not outputs or any(not _small(tensor) for tensor in outputs) or any(tensor is not outputs[0] for tensor in written):
            return
        if func in OF_ONE_NUMBER:
            values = self._filled(func, args, kwargs, outputs[0])
        elif given or func in MADE_OF_NUMBERS:
            # what was written to has its value from before: its version is that of the write already
            with self._as_of(given):
                found = self.result(func, args, kwargs)
                values = [self._of(args[0])] if func is torch.Tensor.__setitem__ and found is not _UNKNOWN else tensors_in([found])
        else:
            return
        if len(values) == len(outputs):
            for tensor, value in zip(outputs, values, strict=True):
                if isinstance(tensor, FakeTensor) and tuple(value.shape) == tuple(tensor.shape) and value.dtype == tensor.dtype:
                    self._values[tensor] = tensor._version, value

    @contextmanager
    def _as_of(self, given: Sequence[tuple[torch.Tensor, int]]) -> Iterator[None]:
        """Meanwhile values of these tensors count that were noted at these versions."""
        before = {id(tensor): self._values.get(tensor) for tensor, _ in given}
        for tensor, version in given:
            noted = before[id(tensor)]
            if noted is not None and noted[0] == version:
                self._values[tensor] = tensor._version, noted[1]
        try:
            yield
        finally:
            for tensor, _ in given:
                noted = before[id(tensor)]
                if noted is not None:
                    self._values[tensor] = noted

    def _filled(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: torch.Tensor) -> list[torch.Tensor]:
        number = OF_ONE_NUMBER[func]
        if number is None:
            number = kwargs.get("fill_value", args[-1])
        if not isinstance(number, int | float | bool):
            return []
        with _plain():
            return [torch.full(tuple(made.shape), number, dtype=made.dtype, device=self._real)]

    def counted(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operation gives whose size depends on values, as constants of the graph; None where it is no such, or unknown."""
        if func not in COUNTED or get_proxy_mode() is None or not _counts(func, args, kwargs):
            return None
        found = self.result(func, args, kwargs)
        if found is _UNKNOWN or any(not _small(tensor) for tensor in tensors_in([found])):
            return None
        return pytree.tree_map_only(torch.Tensor, self._constant, found)

    def positions(self, mask: torch.Tensor) -> list[torch.Tensor] | None:
        """Where a mask of known value is true, an index for each of its axes; None where it is not known, or large."""
        value = self._of(mask)
        if value is _UNKNOWN:
            return None
        with _plain():
            found = list(value.nonzero().unbind(1))
        return [self._constant(each) for each in found] if all(map(_small, found)) else None

    def _constant(self, value: torch.Tensor) -> torch.Tensor:
        with _plain():
            numbers = value.tolist()
        made = called(torch.tensor, [numbers], {"dtype": value.dtype, "device": self._real})
        if made.shape != value.shape:
            made = called(torch.Tensor.reshape, [made, tuple(value.shape)], {})  # of no elements
        self._values[made] = made._version, value
        return made


def is_known(value: Any) -> bool:
    """Whether `KnownValues.result` found it."""
    return value is not _UNKNOWN


def _small(tensor: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in tensor.shape) and tensor.numel() <= LARGEST


def _counts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the size depends on values in this form of the operation."""
    if func is torch.where:
        return len(args) == 1 and not kwargs
    if func is torch.Tensor.__getitem__:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in([args[1]]))
    return True
