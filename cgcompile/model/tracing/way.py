"""One path through a model's Python code: its branches on tensors, with forced answers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cgbundle.format.schema import Tree

from ..user_code import called_here

Spot = tuple[Any, ...]
"""A position in Python: the code and the instruction of every frame of the model, the outermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Python branches on a value that depends on data.

    `state` is equal for two questions only if the complete state of Python is equal, except for tensors.  `names` are the places of
    the tensors in this state, in the order in which the marker operator takes them after the predicate.  `memory` says which of
    them share memory.  `asks`, `reads` and `sizes` count earlier answers, numbers that Python read, and reads of sizes.  `caller`
    is the result of `user_code.called_here`.
    """

    answer: bool
    where: str
    line: str
    caller: str
    spot: Spot
    state: Hashable
    names: tuple[str, ...]
    memory: Hashable
    asks: int
    reads: int
    sizes: int


class TooManyTurns(Exception):
    """A loop branches more often than the limit allows, and no bound is known."""

    def __init__(self, where: str, line: str, caller: str) -> None:
        super().__init__(f"{where}: {line}")
        self.where, self.line, self.caller = where, line, caller


class TracedWay:
    """The record of one traced call.  Its first answers are `forced`.  Later answers are those of `preferred` for the position,
    else True.  `limit`: maximum questions at one position.

    `asks` are all answers in order, also for known values and repeated questions.  `reads` says of every number that Python read
    whether it depends on data.  `sizes` has an entry per read of a tensor's sizes: an expression for each size that depends on
    data, else None.  A ForcedWay takes the same path with these three lists.  `raised` is the model's exception, `result` the tree
    of its outputs, and `changed` are attributes that the call changed.
    """

    def __init__(self, forced: Sequence[bool], preferred: Mapping[Spot, bool], limit: int) -> None:
        self.forced, self.preferred, self.limit = tuple(forced), preferred, limit
        self.begin()

    def begin(self) -> None:
        """Clears the record of an earlier call."""
        self.questions: list[Question] = []
        self.asks: list[bool] = []
        self.reads: list[bool] = []
        self.sizes: list[tuple[Any, ...]] = []
        self.raised: BaseException | None = None
        self.result: Tree | None = None
        self.changed: tuple[str, ...] = ()
        self.symbols: dict[Any, Any] = {}
        self.answers: list[tuple[torch.Tensor, int, bool]] = []

    def answered(self, tensor: torch.Tensor) -> bool | None:
        """Returns the earlier answer for this tensor, or None if there is none, or if the tensor was written to since then."""
        answers = [answer for key, version, answer in self.answers if key is tensor and version == tensor._version]
        return answers[0] if answers else None

    def next_answer(self, spot: Spot, where: str, line: str) -> bool:
        """Returns the answer to a new question.  Raises TooManyTurns."""
        count = len(self.questions)
        if count < len(self.forced):
            return self.forced[count]
        if sum(question.spot == spot for question in self.questions) >= self.limit:
            raise TooManyTurns(where, line, called_here())
        return self.preferred.get(spot, True)


@dataclass(kw_only=True, slots=True)
class ForcedWay:
    """The answers of a traced call, for a call with real tensors.  `wrong`: the call took another path."""

    asks: Iterator[bool]
    reads: Iterator[bool]
    sizes: Iterator[tuple[Any, ...]] = field(default_factory=lambda: iter(()))
    wrong: bool = field(default=False)

    def ask(self, natural: bool) -> bool:
        """Returns the next answer.  If there is none, sets `wrong` and returns `natural`."""
        answer = next(self.asks, None)
        self.wrong = self.wrong or answer is None
        return natural if answer is None else answer

    def read(self) -> bool:
        """Returns whether the next number that Python reads depends on data."""
        depends = next(self.reads, None)
        self.wrong = self.wrong or depends is None
        return bool(depends)

    def ended(self) -> bool:
        """Returns whether the call used exactly the answers and reads of the traced one."""
        return not self.wrong and next(self.asks, None) is None and next(self.reads, None) is None


@contextmanager
def noting_errors(way: TracedWay | ForcedWay | None) -> Iterator[None]:
    """Records an exception of the model's code inside this context."""
    try:
        yield
    except Exception as error:
        if isinstance(way, TracedWay):
            way.raised = error
        raise


_LIBRARY = torch.library.Library("cgcompile", "FRAGMENT")
_LIBRARY.define("asked(Tensor[] values, int number) -> ()")
_LIBRARY.impl("asked", lambda values, number: None, "CompositeExplicitAutograd")
torch.library.register_fake("cgcompile::asked", lambda values, number: None, lib=_LIBRARY)

ASKED = torch.ops.cgcompile.asked.default
"""The marker operator in a traced graph for question `number`.  It takes the predicate, then the tensors of Python's state."""

torch.fx.node.has_side_effect(ASKED)
