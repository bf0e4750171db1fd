"""Branches of a call with forced answers: a traced call, with a marker in the graph at each branch, or one with real tensors.

While such a call is traced, `__bool__` of torch.SymBool, torch.SymInt and torch.SymFloat is replaced, because a comparison of a
number from a tensor returns one of these (torch 2.11, 2.13).  Code of torch gets the original answer.  Private interfaces:
`torch.overrides._pop_mode_temporarily`, `create_symintnode` and `_maybe_evaluate_static` of a ShapeEnv, and
`_override_builtin_ops`: while torch.export traces, `min` and `max` of tensors do not branch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any

import torch
from torch._export.non_strict_utils import _override_builtin_ops
from torch.fx.experimental.symbolic_shapes import SymT, symbol_is_type
from torch.overrides import _pop_mode_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from ..side_effects import NOTHING, SideEffects
from ..tracing.predicates import EQUAL, differ_in_shape, number_of, predicate, truth_of
from ..tracing.python_state import TORCH, PythonState, model_frames, spot_of
from ..tracing.tracked_numbers import asked, converted, tracked
from ..tracing.way import ASKED, ForcedWay, Question, TracedWay
from ..user_code import called_here, here
from .data_reads import ONE_TENSOR, DataReads
from .known_values import KnownValues, is_known
from .operations import run_at
from .tensor_places import DEVICE, TensorPlaces
from .tracing import called, has_no_data, tensors_in

MIN_MAX = os.path.join("torch", "_export", "non_strict_utils.py")
"""The file with torch.export's replacements of Python's `min` and `max` (torch 2.11, 2.13)."""

NUMBERS = (torch.SymBool, torch.SymInt, torch.SymFloat)


class TracedReads(DataReads):
    """The branches of a traced call of `model`.  `entry` is the code of the function that calls the model."""

    def __init__(
        self,
        places: TensorPlaces,
        values: KnownValues,
        way: TracedWay,
        model: torch.nn.Module,
        inputs: tuple[torch.Tensor, ...],
        entry: CodeType,
    ) -> None:
        super().__init__(places, values, SideEffects(), frozenset(), NOTHING)
        self._way, self._model, self._inputs, self._entry = way, model, inputs, entry
        self._read: set[Any] = set()
        for tensor in inputs:
            for size in tensor.shape:
                if isinstance(size, torch.SymInt):
                    self._way.symbols[size.node.expr] = lambda size=size: torch.scalar_tensor(size, dtype=torch.float64)

    def truth(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """Returns the value of a function of BRANCHES."""
        if not any(has_no_data(tensor) for tensor in tensors_in((args, kwargs))):
            return self._noted(bool(run_at(self._places, func, args, kwargs, DEVICE)))
        if is_known(value := self._values.result(func, args, kwargs)):
            return self._noted(bool(value))
        if func in EQUAL and differ_in_shape(*args):
            return self._noted(False)
        condition = called(lambda: predicate(func, args, kwargs), [], {})
        if condition is None:
            return bool(called(func, args, kwargs))  # an error of torch, or False for different shapes
        if func in ONE_TENSOR:
            return self._answer(condition, tensors_in((args, kwargs)))
        return self._answer(condition, (), by_itself=False)

    def read(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the value of a function of NUMBERS."""
        position = len(self._way.reads)
        value = self._values.result(func, args, kwargs)
        if is_known(value):
            self._way.reads.append(False)
            return value
        tensor = args[0]
        exact = torch.float64 if tensor.is_floating_point() else torch.int64
        value = called(func, args, kwargs)
        copy = called(lambda: tensor.detach().to(exact, copy=True), [], {})
        for place, number in enumerate(tree_leaves(value)):
            if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
                self._read |= number.node.expr.free_symbols
                for symbol in number.node.expr.free_symbols:
                    self._way.symbols.setdefault(symbol, lambda place=place: copy.reshape(-1)[place])
        self._way.reads[position:] = [True] * len(tree_leaves(value))  # tolist() reads each number separately
        return value

    def number_truth(self, number: Any) -> bool | None:
        """Returns whether a traced number is true, or None if it depends on no number that was read from a tensor."""
        expression = number.node.expr
        selected = [symbol for symbol in expression.free_symbols - self._read if symbol_is_type(symbol, SymT.UNBACKED_INT)]
        shapes = number.node.shape_env
        if (selected and shapes is None) or (not selected and expression.free_symbols.isdisjoint(self._read)):
            return None  # it depends on sizes only: torch decides
        if selected and (static_value := shapes._maybe_evaluate_static(expression)) is not None:
            return self._noted(bool(static_value))
        for symbol in selected:  # a symbol is the number of rows that a mask selects
            size = shapes.create_symintnode(symbol, hint=None)
            self._way.symbols.setdefault(symbol, lambda size=size: torch.scalar_tensor(size, dtype=torch.float64))
        with _pop_mode_temporarily():  # these are not operations of the model
            condition = called(lambda: truth_of(expression, self._way.symbols), [], {})
            return None if condition is None else self._answer(condition, ())

    def read_sizes(self, sizes: Any) -> Any:
        """Returns the result of a function of SIZES to Python, and records which sizes depend on data."""
        size_tuple = sizes if isinstance(sizes, tuple) else (sizes,)
        self._way.sizes.append(tuple([size.node.expr if _by_data(size) else None for size in size_tuple]))
        return sizes

    def converted(self, kind: type, value: Any) -> Any:
        """Returns `int(value)` or `float(value)`, or None if the value does not depend on data."""
        if isinstance(value, torch.Tensor):
            value = value.item() if value.numel() == 1 and has_no_data(value) else None
            if isinstance(value, int | float):
                return kind(value)  # a known value
        if not self._depends(value):
            return None
        return torch.sym_int(value) if kind is int else torch.sym_float(value)

    def asked_of(self, plain: Callable[[Any], bool], value: Any) -> bool | None:
        """Returns the result of `plain` (`math.isnan` or similar), or None if the value does not depend on data."""
        if not self._depends(value):
            return None
        with _pop_mode_temporarily():
            number = called(lambda: number_of(value.node.expr, self._way.symbols), [], {})
            return None if number is None else self._answer(called(getattr(torch, plain.__name__), [number], {}), ())

    def length(self, value: Any) -> Any:
        """Returns `len(value)`, or None if the length is a constant."""
        size = value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else None
        return size if isinstance(size, torch.SymInt) else None

    def _depends(self, value: Any) -> bool:
        return isinstance(value, NUMBERS) and not value.node.expr.free_symbols.isdisjoint(self._read)

    def _noted(self, answer: bool) -> bool:
        self._way.asks.append(answer)
        return answer

    def _answer(self, condition: torch.Tensor, tensors: Sequence[torch.Tensor], by_itself: bool = True) -> bool:
        """Returns the answer to a branch on `condition`, and records the branch.  The same tensor gets the same answer again.
        `by_itself`: see PythonState."""
        way = self._way
        for tensor in tensors:
            if (earlier_answer := way.answered(tensor)) is not None:
                return self._noted(earlier_answer)
        frames = model_frames(self._entry)
        where, line = here()
        spot = spot_of(frames)
        answer = way.next_answer(spot, where, line)
        state = PythonState(frames, self._model, self._inputs, by_itself)
        state_tensors = [*state.tensors, *self._counts(state.sizes)]
        called(ASKED, [[condition, *[tensor for _, tensor in state_tensors]], len(way.questions)], {})
        tensor_answers = tuple([(name, way.answered(tensor)) for name, tensor in state.tensors])
        question = Question(
            answer=answer, where=where, line=line, caller=called_here(), spot=spot, state=(state.value, tensor_answers),
            memory=state.memory, names=tuple([name for name, _ in state_tensors]), asks=len(way.asks), reads=len(way.reads),
            sizes=len(way.sizes),
        )  # fmt: skip
        way.questions.append(question)
        way.answers += [(tensor, tensor._version, answer) for tensor in tensors]
        return self._noted(answer)

    def _counts(self, sizes: Sequence[torch.SymInt]) -> list[tuple[str, torch.Tensor]]:
        """Returns the row counts that `sizes` depend on, by name: int64 tensors without dimensions."""
        symbols = {symbol: size.node.shape_env for size in sizes for symbol in size.node.expr.free_symbols}
        counted = [symbol for symbol in symbols if symbol_is_type(symbol, SymT.UNBACKED_INT) and symbol not in self._read]
        symints = {symbol: symbols[symbol].create_symintnode(symbol, hint=None) for symbol in sorted(counted, key=str)}
        return [(f"size.{symbol}", called(torch.scalar_tensor, [size], {"dtype": torch.int64})) for symbol, size in symints.items()]


class ForcedReads(DataReads):
    """The branches of a call with real tensors that takes the path of a traced call."""

    def __init__(self, places: TensorPlaces, values: KnownValues, way: ForcedWay) -> None:
        super().__init__(places, values, SideEffects(), frozenset(), NOTHING)
        self._way = way

    def truth(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """Returns the forced answer for a function of BRANCHES."""
        return self._way.ask(False)

    def read(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the value of a function of NUMBERS, tracked if it depends on data."""
        value = called(func, args, kwargs)
        return tree_map(lambda leaf: tracked(leaf, self._way.ask) if self._way.read() else leaf, value)

    def read_sizes(self, sizes: Any) -> Any:
        """Returns sizes to Python, tracked if they depend on data."""
        traced = next(self._way.sizes, ())
        if all(expression is None for expression in traced):
            return sizes
        if not isinstance(sizes, tuple):
            return tracked(sizes, self._way.ask, traced[0])
        self._way.wrong = self._way.wrong or len(traced) != len(sizes)
        pairs = zip(sizes, traced, strict=False)
        return torch.Size([size if expr is None else tracked(size, self._way.ask, expr) for size, expr in pairs])

    def converted(self, kind: type, value: Any) -> Any:
        """See TracedReads."""
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            return converted(kind, value)
        number = value.item()
        tracked_number = converted(kind, number)
        return kind(number) if tracked_number is None else tracked_number

    def asked_of(self, plain: Callable[[Any], bool], value: Any) -> bool | None:
        """See TracedReads."""
        return asked(plain, value)

    def length(self, value: Any) -> Any:
        """See TracedReads."""
        size = value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else None
        return None if type(size) is int else size


def _by_data(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and any(symbol_is_type(sym, SymT.UNBACKED_INT) for sym in size.node.expr.free_symbols)


@contextmanager
def numbers_asked(answer: Callable[[Any], bool | None]) -> Iterator[None]:
    """Uses `answer` inside this context for the truth of traced numbers that the model's code tests."""
    originals = {kind: kind.__bool__ for kind in NUMBERS if hasattr(kind, "__bool__")}

    def replaced(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def __bool__(number: Any) -> bool:
            file = sys._getframe(1).f_code.co_filename
            forced_answer = None if _inside_torch(file) or not number.node.expr.free_symbols else answer(number)
            return original(number) if forced_answer is None else forced_answer

        return __bool__

    for kind, original in originals.items():
        kind.__bool__ = replaced(original)
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.__bool__ = original


def min_and_max_as_traced() -> AbstractContextManager[None]:
    """Makes `min` and `max` of tensors operations inside this context, as in the traced call, so that they do not branch."""
    return _override_builtin_ops()


def _inside_torch(file: str) -> bool:
    if file.endswith(MIN_MAX):
        return False
    return os.path.abspath(file).startswith(TORCH) or f"{os.sep}sympy{os.sep}" in file
