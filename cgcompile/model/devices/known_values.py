"""Tensors of a traced call whose values are known: they depend on no input and on no buffer that calls write to.

Models create positions, grids and masks from sizes, and read values of parameters and buffers: a flag, the time steps of a
solver.  In eager PyTorch, Python can read these tensors.  A trace has no values, so export fails.  This module records the
expression of each tensor.  If Python reads a value that depends only on constants, the expression is evaluated with real tensors
(tracing/constant_expressions.py).  The value is the same in every call of these sizes, as long as the weights in the expression do
not change.  Their names are recorded with the source line that reads the value.

An expression is valid while the tensor has the recorded version and storage, and no operation has written to the storage since.

Private interfaces (torch 2.11, 2.13): `torch.UntypedStorage._cdata`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from numbers import Number
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ..tracing.constant_expressions import Expression, Leaf, NotConstant, Operation, Result, leaf, plain
from ..user_code import here
from .size_lists import SizeLists
from .tracing import called, tensors_in

LARGEST = 1 << 16
"""Maximum elements of a value that becomes a literal of the graph: enough for short masks and positions, not for weights."""

MADE_OF_NUMBERS = frozenset({
    torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.linspace, torch.tensor, torch.as_tensor, torch.tril_indices,
    torch.triu_indices, torch.scalar_tensor, torch.hann_window, torch.logspace, torch.hamming_window, torch.blackman_window,
    torch.bartlett_window, torch.kaiser_window, torch.asarray, torch.fft.fftfreq, torch.fft.rfftfreq,
})  # fmt: skip
"""Functions that create tensors from numbers."""

OF_ONE_NUMBER: Mapping[Any, float | None] = {
    torch.zeros_like: 0, torch.ones_like: 1, torch.full_like: None, torch.Tensor.new_zeros: 0, torch.Tensor.new_ones: 1,
    torch.Tensor.new_full: None,
}  # fmt: skip
"""Functions that use only the size of their first tensor, and the fill value.  None: the fill value is the last argument."""

SIZED = frozenset({
    F.interpolate, F.pad, torch.multinomial, torch.Tensor.multinomial, torch.Tensor.new_zeros, torch.Tensor.new_ones,
    torch.Tensor.new_full, torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.expand, torch.Tensor.repeat, torch.reshape,
    torch.narrow, torch.Tensor.narrow, torch.topk, torch.Tensor.topk, torch.Tensor.unfold, torch.roll, torch.split,
    torch.Tensor.split,
})  # fmt: skip
"""Functions that take numbers for all arguments except the first.  Python may pass tensors of one element instead."""

MOVES = frozenset({torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.pin_memory})
"""Functions that change only the device.  Values are always on the device of the model."""

INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})

_COUNTED = ("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "repeat_interleave", "histc")
COUNTED = frozenset(
    {getattr(owner, name) for owner in (torch, torch.Tensor) for name in _COUNTED if hasattr(owner, name)}
    | {torch._unique2, torch.where, torch.Tensor.__getitem__}
)
"""Functions whose result may have a size that depends on values."""

REPEATS = frozenset({torch.repeat_interleave, torch.Tensor.repeat_interleave})

NORMS = frozenset({F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm, torch.native_batch_norm})
"""Functions that write to running statistics and do not increase their `_version`, unless argument number `NORM_FLAG` is False."""

NORM_FLAG = 5

PYTHON = frozenset({torch.Tensor.__contains__, torch.Tensor.__format__, torch.Tensor.__complex__})
"""Special methods that return values to Python, except those in BRANCHES and NUMBERS of data_reads.py."""

UNFILLED = frozenset({
    torch.empty_like, torch.Tensor.new_empty, torch.Tensor.new_empty_strided, torch.Tensor.new, torch.Tensor.resize_,
    torch.Tensor.resize_as_, torch.Tensor.data_ptr,
})  # fmt: skip
"""Functions that return uninitialized memory, or an address."""

_ARGUMENTS = (Number, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(...))
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_UNKNOWN = object()


class KnownValues:
    """The known values of one call, whose tensors are on the device `real`.  A call that is not traced has none.  `asked` gets the
    names of parameters and buffers if Python gets a value that depends on them.  Each name has the (file:line, source line) of the
    first such read."""

    def __init__(self, real: torch.device, asked: MutableMapping[str, tuple[str, str]]) -> None:
        self._real, self._asked = real, asked
        self._notes: Any = WeakTensorKeyDictionary()
        self._writes: dict[int, int] = {}
        self._held: list[tuple[str, torch.Tensor]] = []
        self._sizes = SizeLists(self._state)

    def hold(self, tensor: torch.Tensor, value: torch.Tensor, name: str) -> None:
        """Records that a traced tensor, the parameter or buffer `name`, has this value in every call."""
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided or (expression := leaf(value, name)) is None:
            return
        if tensor not in self._notes:  # a tied weight keeps its first name
            self._note(tensor, expression)
        self._held.append((name, tensor))

    def written(self) -> set[str]:
        """Returns the names of the parameters and buffers that the call wrote to."""
        return {name for name, tensor in self._held if not isinstance(self._of(tensor), Leaf)}

    def result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of an operation, also a number or a truth value.  `is_known` is False for an unknown result."""
        operation = self._operation(func, args, kwargs)
        if operation is not None:
            return self._evaluated(operation)
        size = self._sizes.read(func, args) if get_proxy_mode() is not None else None
        return _UNKNOWN if size is None else size

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Like `result` for functions in PYTHON.  The result of any other function is unknown."""
        return self.result(func, args, kwargs) if func in PYTHON and get_proxy_mode() is not None else _UNKNOWN

    def _evaluated(self, operation: Operation) -> Any:
        try:
            value = operation.evaluate()
        except NotConstant:
            return _UNKNOWN
        self._answered(operation.weights)
        return value

    def _answered(self, weights: frozenset[str]) -> None:
        """Records that Python got a value that depends on these weights."""
        if new := weights - self._asked.keys():
            self._asked.update(dict.fromkeys(sorted(new), here()))

    def _operation(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        before: Mapping[int, Any] = MappingProxyType({}),
        written: torch.Tensor | None = None,
    ) -> Operation | None:
        """Returns the call as an expression, or None if an argument is unknown.  `before` has the expressions of tensors before the
        call, by id.  `written` is the tensor that the call writes to."""
        if get_proxy_mode() is None or func in UNFILLED:
            return None
        missing = False

        def value(argument: Any) -> Any:
            nonlocal missing
            expression = before.get(id(argument), _UNKNOWN)
            expression = self._of(argument) if expression is _UNKNOWN else expression
            missing = missing or expression is _UNKNOWN
            return expression

        values, named = pytree.tree_map(value, (list(args), {name: part for name, part in kwargs.items() if name != "pin_memory"}))
        if missing:
            return None
        if func in MOVES:
            return Operation(func=torch.Tensor.detach, args=values[:1], kwargs={})
        if func in MADE_OF_NUMBERS or "device" in named:
            named["device"] = self._real
        if func is torch.Tensor.to:
            values = [self._real if isinstance(part, str) else part for part in values]
        return Operation(func=func, args=values, kwargs=named, written=None if written is None else before[id(written)])

    def has(self, tensor: torch.Tensor) -> bool:
        """Returns whether the value of a tensor is known and depends on no weight."""
        expression = self._of(tensor)
        return expression is not _UNKNOWN and not expression.weights and self._value(tensor) is not None

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the real tensor for a traced one, or None if it is unknown."""
        expression = self._of(tensor)
        try:
            with plain():
                value: torch.Tensor | None = None if expression is _UNKNOWN else expression.value()
        except NotConstant:
            return None
        return value

    def _note(self, tensor: FakeTensor, expression: Expression) -> None:
        self._notes[tensor] = (*self._state(tensor), expression)

    def _state(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """Returns a value that changes when a tensor, or another one that shares its memory, is written to."""
        storage = tensor.untyped_storage()._cdata
        return tensor._version, storage, self._writes.get(storage, 0)

    def _of(self, argument: Any) -> Any:
        """Returns the expression of a tensor, the value of a constant argument, or _UNKNOWN."""
        if isinstance(argument, FakeTensor):
            noted = self._notes.get(argument)
            if noted is not None:
                return noted[3] if noted[:3] == self._state(argument) else _UNKNOWN
            return self._of_sizes(argument)
        if isinstance(argument, torch.Tensor):
            # a constant of the model; traced parameters and buffers are fake
            return leaf(argument) or _UNKNOWN
        if isinstance(argument, slice):
            parts = [self._of(part) for part in (argument.start, argument.stop, argument.step)]
            return _UNKNOWN if any(part is _UNKNOWN or isinstance(part, Expression) for part in parts) else argument
        if isinstance(argument, torch.device):
            return self._real if argument.type != "meta" else _UNKNOWN
        if isinstance(argument, torch.Size):
            return _UNKNOWN if any(isinstance(size, _SYMBOLS) for size in argument) else argument
        return argument if isinstance(argument, _ARGUMENTS) and not isinstance(argument, _SYMBOLS) else _UNKNOWN

    def _of_sizes(self, tensor: FakeTensor) -> Any:
        """Returns the expression of a tensor of sizes if none of them is symbolic, else _UNKNOWN."""
        elements = self._sizes.of(tensor)
        parts = elements if isinstance(elements, list) else [elements]
        if not all(type(part) is int for part in parts):
            return _UNKNOWN
        operation = Operation(func=torch.tensor, args=(elements,), kwargs={"dtype": tensor.dtype, "device": self._real})
        return Result(operation=operation, index=0, shape=tuple(tensor.shape), dtype=tensor.dtype)

    def with_numbers(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Replaces known tensors of one element in the arguments by numbers, where the function takes numbers."""
        if get_proxy_mode() is None:
            return args, kwargs
        if func in MADE_OF_NUMBERS:
            return pytree.tree_map(self._number, (args, kwargs))
        if func in SIZED:
            return [*args[:1], *pytree.tree_map(self._number, args[1:])], pytree.tree_map(self._number, kwargs)
        if func in INDEXING:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            indices = tuple([self._slice(part) if isinstance(part, slice) else self._position(part) for part in index])
            return [args[0], indices if isinstance(args[1], tuple) else indices[0], *args[2:]], kwargs
        if func in REPEATS and kwargs.get("output_size") is None and (size := self._repeated(args, kwargs)) is not None:
            return args, {**kwargs, "output_size": size}
        return args, kwargs

    def _number(self, part: Any) -> Any:
        if not isinstance(part, torch.Tensor) or part.dim() or (value := self._value(part)) is None:
            return part
        self._answered(self._of(part).weights)
        with plain():
            return value.item()

    def _position(self, part: Any) -> Any:
        """Replaces an integer tensor without dimensions, which selects like a number, by the number."""
        is_integer = isinstance(part, torch.Tensor) and not (part.is_floating_point() or part.dtype in (torch.bool, torch.uint8))
        return self._number(part) if is_integer else part

    def _repeated(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
        """Returns the number of rows of `repeat_interleave` with known repeats, or None."""
        repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
        if not isinstance(repeats, torch.Tensor) or repeats.dim() != 1 or repeats.numel() == 1:
            return None
        if (value := self._value(repeats)) is None:
            return None
        self._answered(self._of(repeats).weights)
        with plain():
            return int(value.sum())

    def _slice(self, part: slice) -> slice:
        return slice(self._number(part.start), self._number(part.stop), self._number(part.step))

    @contextmanager
    def noting(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[list[Any]]:
        """Records the expression of a traced operation.  The caller appends the operation's result to the list."""
        results: list[Any] = []
        if get_proxy_mode() is None:
            yield results
            return
        input_versions = [(tensor, tensor._version) for tensor in tensors_in((args, kwargs))]
        expressions = {id(tensor): self._of(tensor) for tensor, _ in input_versions}
        yield results
        outputs = [args[0]] if func is torch.Tensor.__setitem__ else tensors_in(results)
        written = [tensor for tensor, version in input_versions if tensor._version != version]
        unversioned = _unversioned_writes(func, args, kwargs)
        for tensor in [*written, *unversioned]:
            if isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()._cdata
                self._writes[storage] = self._writes.get(storage, 0) + 1
        self._sizes.note(func, args, results[0])
        if not outputs or not all(map(_constant_shape, outputs)) or any(tensor is not outputs[0] for tensor in written):
            return
        if unversioned and not written:
            return
        if func in OF_ONE_NUMBER:
            operation = self._filled(func, args, kwargs, outputs[0])
        elif input_versions or func in MADE_OF_NUMBERS:
            if any(expression is _UNKNOWN for expression in expressions.values()):
                return
            operation = self._operation(func, args, kwargs, expressions, written[0] if written else None)
        else:
            return
        for index, tensor in enumerate(outputs if operation is not None else ()):
            if isinstance(tensor, FakeTensor):
                assert operation is not None
                self._note(tensor, Result(operation=operation, index=index, shape=tuple(tensor.shape), dtype=tensor.dtype))

    def _filled(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: torch.Tensor) -> Operation | None:
        number = OF_ONE_NUMBER[func]
        if number is None:
            number = kwargs.get("fill_value", args[-1])
        if not isinstance(number, int | float | bool):
            return None
        named = {"dtype": output.dtype, "device": self._real}
        return Operation(func=torch.full, args=(tuple(output.shape), number), kwargs=named)

    def counted(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of a function in COUNTED as constants of the graph, or None if it is unknown or large."""
        if func not in COUNTED or get_proxy_mode() is None or not _counts(func, args, kwargs):
            return None
        operation = self._operation(func, args, kwargs)
        try:
            outcome = None if operation is None else operation.evaluate()
        except NotConstant:
            return None
        if operation is None or any(not _small(tensor) for tensor in tensors_in([outcome])):
            return None
        self._answered(operation.weights)
        return pytree.tree_map_only(torch.Tensor, self._constant, outcome)

    def positions(self, mask: torch.Tensor) -> list[torch.Tensor] | None:
        """Returns the indices of True in a mask, one tensor per axis, or None if the mask is unknown or large."""
        value = self._value(mask)
        if value is None:
            return None
        with plain():
            indices = list(value.nonzero().unbind(1))
        if not all(map(_small, indices)):
            return None
        self._answered(self._of(mask).weights)
        return [self._constant(part) for part in indices]

    def _constant(self, value: torch.Tensor) -> torch.Tensor:
        with plain():
            numbers = value.tolist()
        constant = called(torch.tensor, [numbers], {"dtype": value.dtype, "device": self._real})
        if constant.shape != value.shape:
            constant = called(torch.Tensor.reshape, [constant, tuple(value.shape)], {})  # tolist() lost the shape
        if isinstance(constant, FakeTensor) and (expression := leaf(value)) is not None:
            self._note(constant, expression)
        return constant


def is_known(value: Any) -> bool:
    """Returns whether a result of `KnownValues.result` is known."""
    return value is not _UNKNOWN


def _unversioned_writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    if func is torch.Tensor.data.__set__:
        return [args[0]]
    if func in NORMS:
        flag = args[NORM_FLAG] if len(args) > NORM_FLAG else kwargs.get("training", kwargs.get("use_input_stats", True))
        return [] if flag is False else tensors_in((args[1:], kwargs))
    if isinstance(func, torch._ops.OpOverloadPacket | torch._ops.OpOverload):  # a library's operator may not update versions
        packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
        schemas = [getattr(packet, name)._schema for name in packet.overloads()]
        return tensors_in((args, kwargs)) if any(schema.is_mutable for schema in schemas) else []
    return []


def _constant_shape(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and all(isinstance(size, int) for size in tensor.shape)


def _small(tensor: torch.Tensor) -> bool:
    return _constant_shape(tensor) and tensor.numel() <= LARGEST


def _counts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether the size of the result depends on values for these arguments."""
    if func is torch.where:
        return len(args) == 1 and not kwargs
    if func in REPEATS:
        return kwargs.get("output_size") is None
    if func is torch.Tensor.__getitem__:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in([args[1]]))
    return True
