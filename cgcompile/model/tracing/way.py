"""One way through a model's Python: the questions that it asks tensors, with forced answers."""

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
    """Python asks for the truth of a value that depends on data.

    `state` is equal for two questions only where everything that Python keeps, but tensors, is equal.  `names` say where Python
    keeps its tensors, in the order in which the graph's marker takes them behind the predicate, and `memory` which of these share
    memory.  `asks`, `reads` and `sizes` count the answers, numbers and sizes that Python got before.
    `caller`: as `user_code.called_here` has it.
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
    """A loop asks again and again: nothing bounds its turns."""

    def __init__(self, where: str, line: str, caller: str) -> None:
        super().__init__(f"{where}: {line}")
        self.where, self.line, self.caller = where, line, caller


class TracedWay:
    """The record of one traced call, which answers `forced` first, then what `preferred` says of the position, else True.

    `asks` are all answers in order, those to known values and repeated questions too, and `reads` say of every number that Python
    read whether it depends on data, and `sizes` has an expression for every size that does, None for another, of every tensor that
    was asked for its sizes: with these, eager PyTorch takes the same way.  `raised` is what the model raised, `result` the
    nesting and the constants of what it gave, and `changed` are attributes that it left changed.
    """

    def __init__(self, forced: Sequence[bool], preferred: Mapping[Spot, bool], limit: int) -> None:
        self.forced, self.preferred, self.limit = tuple(forced), preferred, limit
        self.begin()

    def begin(self) -> None:
        """Forgets an earlier call."""
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
        """What Python was told of this tensor; None where it did not ask, or the tensor changed since."""
        answers = [answer for known, version, answer in self.answers if known is tensor and version == tensor._version]
        return answers[0] if answers else None

    def next_answer(self, spot: Spot, where: str, line: str) -> bool:
        """The answer to a new question.  Raises TooManyTurns."""
        count = len(self.questions)
        if count < len(self.forced):
            return self.forced[count]
        if sum(question.spot == spot for question in self.questions) >= self.limit:
            raise TooManyTurns(where, line, called_here())
        return self.preferred.get(spot, True)


@dataclass(kw_only=True, slots=True)
class ForcedWay:
    """Answers of a traced call, given to a call with real tensors.  `wrong`: the call asked for something else."""

    asks: Iterator[bool]
    reads: Iterator[bool]
    sizes: Iterator[tuple[Any, ...]] = field(default_factory=lambda: iter(()))
    wrong: bool = field(default=False)

    def ask(self, natural: bool) -> bool:
        """The next answer."""
        answer = next(self.asks, None)
        self.wrong = self.wrong or answer is None
        return natural if answer is None else answer

    def read(self) -> bool:
        """Whether the next number depends on data."""
        depends = next(self.reads, None)
        self.wrong = self.wrong or depends is None
        return bool(depends)

    def ended(self) -> bool:
        """Whether the call asked for exactly what the traced one did."""
        return not self.wrong and next(self.asks, None) is None and next(self.reads, None) is None


@contextmanager
def noting_errors(way: TracedWay | ForcedWay | None) -> Iterator[None]:
    """Notes what the model's code raises inside."""
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
"""Stands in a traced graph where Python asks question `number`: the predicate, then the tensors that Python keeps."""

torch.fx.node.has_side_effect(ASKED)
