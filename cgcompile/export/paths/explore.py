"""All ways through a model's Python: a line for each that is not the rest of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.export import ExportedProgram
from torch.fx import Node

from ...model.flat_module import FlatModule
from ...model.side_effects import WHILE_FIX, Obstacle
from ...model.tracing.way import Question, Spot, TooManyTurns
from .joins import Join, joins
from .lines import Line, Raised, trace_line

ENDLESS = f"{WHILE_FIX}; --max-paths says how many turns are tried"
TOO_MANY = "let --max-paths be larger, or choose with torch.where"

TURNS = 4
"""How often a place asks before a trace that stays in its loop shows whether anything bounds the turns."""

RESTARTS = 3
"""How often the lines are traced anew because another one shows more tensors apart."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Branch:
    """What happens with the other answer to a question: another line until it joins, or an error of the model."""

    other: Line | Raised
    join: Join | None


class PathsRefused(Exception):
    """The ways through a model cannot become one program; `obstacle` says why, with the line that asks.  It causes a ModelError."""

    def __init__(self, code: str, question: Question | TooManyTurns, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.code, self.hint = code, hint
        message = f"{reason}{question.caller}"
        self.obstacle = Obstacle(rule=code, message=message, where=question.where or "model", source=question.line)


class _Restart(Exception):
    """Other answers are preferred from now on."""


class Ways:
    """The lines of a model, traced when they are asked for.

    `attempt` exports the model, whose answers `flat` has; more than `most` lines are refused.
    """

    def __init__(self, flat: FlatModule, attempt: Callable[[], ExportedProgram], most: int) -> None:
        self._flat, self._attempt, self._most = flat, attempt, most
        self._lines: dict[tuple[bool, ...], Line | Raised] = {}
        self._raising: dict[tuple[bool, ...], Raised] = {}
        self._branches: dict[tuple[Line, int], Branch] = {}
        self._preferred: dict[Spot, bool] = {}
        self._forbidden: set[tuple[Line, int, int]] = set()
        self._seen: list[Question] = []
        self._last = False

    def root(self) -> Line | Raised:
        """The first line, all of whose branches are known.  Raises data-dependent-branch, structure-unsupported."""
        for restarts in range(RESTARTS + 1):
            try:
                return self._explored(last=restarts == RESTARTS)
            except _Restart:
                self._lines, self._branches, self._raising = {}, {}, {}
        raise AssertionError("the last time nothing restarts")

    def _explored(self, last: bool) -> Line | Raised:
        self._last = last
        line = self._line(())
        if isinstance(line, Raised):
            return line
        better = {}
        for number, question in enumerate(line.questions):
            other = self._line((*line.answers[:number], not line.answers[number]))
            if isinstance(other, Line) and next(joins(line, other, number)) is None:
                better[question.spot] = not question.answer
        self._restart(better)
        for number in reversed(range(len(line.questions))):
            self.branch(line, number)
        return line

    def _restart(self, better: Mapping[Spot, bool]) -> None:
        """Traces all lines anew where other answers show more tensors apart, as `y` and `x` after `y = x` without a change."""
        if better and not self._last:
            self._preferred |= better
            raise _Restart

    @property
    def lines(self) -> list[Line]:
        """All lines that were traced."""
        return [line for line in self._lines.values() if isinstance(line, Line)]

    def forbid(self, line: Line, number: int, position: int) -> None:
        """The branch of a question may not join at this position: what follows needs a value of one way alone."""
        self._forbidden.add((line, number, position))
        self._branches = {}

    def branch(self, line: Line, number: int) -> Branch:
        """What happens with the other answer to question `number` of a line."""
        if (line, number) not in self._branches:
            self._branches[line, number] = self._branch(line, number)
        return self._branches[line, number]

    def _branch(self, line: Line, number: int) -> Branch:
        forced = (*line.answers[:number], not line.answers[number])
        self._check_bounded(line, number, forced)
        other = self._line(forced)
        if isinstance(other, Raised):
            return Branch(other=other, join=None)
        for join in joins(line, other, number):
            if join is None:
                self._restart({line.questions[number].spot: not line.answers[number]})
            elif (line, number, join.main) in self._forbidden:
                continue
            elif self._closed(line, number, join.main) and self._closed(other, number, join.other):
                if join.ends and line.result != other.result:
                    question = line.questions[number]
                    raise PathsRefused(
                        "structure-unsupported",
                        question,
                        f"the ways give results of different nesting or constants: {line.result} and {other.result}",
                        "return tensors in the same structure on every way",
                    )
                return Branch(other=other, join=join)
        raise AssertionError("two lines meet at their end")

    def _check_bounded(self, line: Line, number: int, forced: tuple[bool, ...]) -> None:
        """Raises data-dependent-branch where a place that got one answer TURNS times asks without end: one trace tells, before
        every number of turns has become a line."""
        spot, stays = line.questions[number].spot, forced[number]
        turns = [question.answer for question in line.questions[:number] if question.spot == spot]
        if turns == [stays] * TURNS:
            self._trace(forced, {**self._preferred, spot: stays})

    def _closed(self, line: Line, number: int, position: int) -> bool:
        """Whether all branches behind question `number` and before `position` have joined the line there."""
        inner = [at for at in range(number + 1, len(line.markers)) if line.markers[at] < position]
        met = [self.branch(line, at).join for at in reversed(inner)]
        return all(join is None or join.main <= position for join in met)

    def _line(self, forced: tuple[bool, ...]) -> Line | Raised:
        """The line that begins with these answers, on which the model does not raise if any does not."""
        if forced in self._raising:
            return self._raising[forced]
        if forced not in self._lines:
            self._lines[forced] = line = self._traced(forced)
            if isinstance(line, Line):
                self._check_shapes(line)
        return self._lines[forced]

    def _check_shapes(self, line: Line) -> None:
        """Raises structure-unsupported for results of other constant sizes than those of the first line: no branch gives both."""
        first = self.lines[0]
        for slot in [slot for slot in line.outputs if slot[0] == "result"]:
            pair = [way.outputs.get(slot) for way in (first, line)]
            if not all(isinstance(value, Node) for value in pair):
                continue
            one, other = [value.meta["val"].shape for value in pair if isinstance(value, Node)]
            for axis, (left, right) in enumerate(zip(one, other, strict=False)):
                counted = any(("count", (slot[1], axis)) in way.outputs for way in (first, line))
                if isinstance(left, int) and isinstance(right, int) and left != right and not counted and line.questions:
                    question = line.questions[-1]
                    fix = (
                        WHILE_FIX
                        if question.line.startswith("while ")
                        else "return tensors of the same dtype and shape on every way"
                    )
                    reason = f"one way gives a result of {list(one)}, the other one of {list(other)}"
                    raise PathsRefused("structure-unsupported", question, reason, fix)

    def _traced(self, forced: tuple[bool, ...]) -> Line | Raised:
        answers = forced
        while True:
            if len(self._lines) + len(self._raising) >= self._most:
                raise self._too_many()
            line, questions = self._trace(answers, self._preferred)
            self._seen += questions
            if isinstance(line, Line):
                return line
            answers = tuple([question.answer for question in questions])
            while len(answers) > len(forced):
                self._raising[answers] = line
                self._preferred.setdefault(questions[len(answers) - 1].spot, not answers[-1])
                answers = (*answers[:-1], not answers[-1])
                if answers not in self._raising:
                    break
                answers = answers[:-1]
            else:
                return line

    def _trace(self, answers: tuple[bool, ...], preferred: Mapping[Spot, bool]) -> tuple[Line | Raised, tuple[Question, ...]]:
        try:
            return trace_line(self._flat, self._attempt, answers, preferred, self._most)
        except TooManyTurns as error:
            reason = f"nothing bounds the turns of this loop: it asked {self._most} times"
            raise PathsRefused("data-dependent-branch", error, reason, ENDLESS) from error

    def _too_many(self) -> PathsRefused:
        places = list(dict.fromkeys([question.where for question in self._seen[1:]]))
        reason = f"there are more than {self._most} paths, which also ask at {', '.join(places[:4])}"
        return PathsRefused("data-dependent-branch", self._seen[0], reason, TOO_MANY)
