"""Expressions of constants, which describe how tensors of a traced call are computed.  They are evaluated with real tensors if
Python needs a value.

A leaf is a tensor of the model with its real data.  An operation takes leaves, results of other operations, and plain arguments.
It runs only if its value is needed, so a trace of large weights costs nothing.  Evaluation writes to no tensor of the model: an
in-place operation writes to a copy.

Private interfaces (torch 2.11, 2.13): `torch.utils._python_dispatch._disable_current_modes`, `torch._C._functorch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..devices.tracing import tensors_in

KEPT = 1 << 22
"""An operation caches a result with at most this many elements.  It computes a larger result again each time."""


class NotConstant(Exception):
    """The build cannot compute a value: it would be random, or the operation fails."""


class _NoDraws(TorchDispatchMode):
    """A mode that raises before a random number is drawn."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotConstant
        return func(*args, **(kwargs or {}))


@contextmanager
def plain() -> Iterator[None]:
    """Disables tracing and all modes, also the user's, inside this context."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leaf:
    """A real tensor at a version (None for a tensor without versions).  `weights` has its name if it is a parameter or a buffer."""

    tensor: torch.Tensor
    version: int | None
    weights: frozenset[str]

    def value(self) -> torch.Tensor:
        """Returns the tensor.  Raises NotConstant if it was written to since then."""
        if version_of(self.tensor) != self.version:
            raise NotConstant
        return self.tensor.detach()


@dataclass(kw_only=True, slots=True, eq=False)
class Operation:
    """A call of `func` with a Leaf or Result in place of every tensor.  `written` is the Leaf or Result that the call writes to.
    `weights` are the names of all parameters and buffers in the expression."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    written: Any = None
    weights: frozenset[str] = field(init=False)
    _parents: tuple[Operation, ...] = field(init=False)
    _outcome: Any = field(init=False, default=None)
    _failed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Leaf | Result)]
        self.weights = frozenset().union(*[leaf.weights for leaf in leaves])
        self._parents = tuple(dict.fromkeys([leaf.operation for leaf in leaves if isinstance(leaf, Result)]))

    def evaluate(self) -> Any:
        """Returns the result.  For an assignment to a part of a tensor, this is the complete tensor.  Raises NotConstant."""
        waiting: list[Operation] = [self]
        done: dict[int, Any] = {}
        while waiting:  # no recursion: a loop may create a long chain
            operation = waiting[-1]
            pending = [parent for parent in operation._parents if parent._outcome is None and id(parent) not in done]
            if operation._failed or any(parent._failed for parent in operation._parents):
                self._failed = True
                raise NotConstant
            if pending:
                waiting += pending
                continue
            if id(operation) not in done:
                done[id(operation)] = operation._outcome if operation._outcome is not None else operation._run(done)
            waiting.pop()
        return done[id(self)]

    def _run(self, done: Mapping[int, Any]) -> Any:
        """Runs the call.  Its parents must have run."""
        copy: torch.Tensor | None = None

        def value(leaf: Any) -> Any:
            nonlocal copy
            if isinstance(leaf, Leaf):
                real = leaf.value()
            elif isinstance(leaf, Result):
                real = leaf.of(done[id(leaf.operation)] if leaf.operation._outcome is None else leaf.operation._outcome)
            else:
                return leaf
            if leaf is not self.written:
                return real
            copy = real.clone() if copy is None else copy
            return copy

        try:
            with plain(), _NoDraws(), torch.no_grad():
                args, kwargs = pytree.tree_map(value, (list(self.args), dict(self.kwargs)))
                result = self.func(*args, **kwargs)
        except Exception as error:  # whatever torch raises for these values
            self._failed = True
            raise NotConstant from error
        outcome = copy if result is None else result
        if sum(tensor.numel() for tensor in tensors_in([outcome])) <= KEPT:
            self._outcome = outcome
        return outcome


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Result:
    """Tensor number `index` of the result of an operation, with the shape and dtype of the trace."""

    operation: Operation
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def weights(self) -> frozenset[str]:
        """The names of the parameters and buffers in the expression."""
        return self.operation.weights

    def of(self, outcome: Any) -> torch.Tensor:
        """Returns the tensor from the outcome of the operation.  Raises NotConstant if the trace saw another shape or dtype."""
        tensors = tensors_in([outcome])
        tensor = tensors[self.index] if self.index < len(tensors) else None
        if tensor is None or tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise NotConstant
        return tensor

    def value(self) -> torch.Tensor:
        """Returns the real tensor.  Raises NotConstant."""
        return self.of(self.operation.evaluate())


Expression = Leaf | Result


def version_of(tensor: torch.Tensor) -> int | None:
    """Returns the version of a tensor, which counts writes, or None for an inference tensor."""
    return None if tensor.is_inference() else tensor._version


def leaf(tensor: torch.Tensor, weight: str = "") -> Leaf | None:
    """Returns a real tensor as an expression, or None for another class or layout, or a tensor without data."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout is not torch.strided:
        return None
    if tensor.is_meta or tensor.is_quantized or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return Leaf(tensor=tensor, version=version_of(tensor), weights=frozenset({weight} if weight else ()))
