"""Traces the paths through a model's Python code, and finds where they join.  The trace of a path is a `Line`.  Questions
after a join are explored on only one of the two paths."""

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

ENDLESS = f"{WHILE_FIX}; --max-paths sets how many iterations are tried"
TOO_MANY = "raise --max-paths, or select with torch.where"

TURNS = 4
"""A position with this many equal answers is probably a loop.  An extra trace then tests whether the loop ends."""

RESTARTS = 3
"""Maximum number of times that all lines are traced again with other preferred answers (see `TracedPaths._restart`)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Branch:
    """The path with the other answer to a question.  `other`: its line, or the error that the model raises.  `join`: where the
    lines join; None if the model raises."""

    other: Line | Raised
    join: Join | None


class PathsRefused(Exception):
    """The paths of a model cannot become one program.  `obstacle`: the reason, and the source line of the question.  The
    exception is the `__cause__` of a ModelError."""

    def __init__(self, code: str, question: Question | TooManyTurns, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.code, self.hint = code, hint
        message = f"{reason}{question.caller}"
        self.obstacle = Obstacle(rule=code, message=message, where=question.where or "model", source=question.line)


class _Restart(Exception):
    """Raised if preferred answers changed: all lines must be traced again."""


class TracedPaths:
    """The lines of a model's paths, traced on demand.

    `attempt` exports the model, with the answers in `flat.way`.  `most`: maximum number of lines.
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
        """Traces all paths, and returns the first line.  Raises PathsRefused."""
        for restarts in range(RESTARTS + 1):
            try:
                return self._explored(last=restarts == RESTARTS)
            except _Restart:
                self._lines, self._branches, self._raising = {}, {}, {}
        raise AssertionError("the last attempt cannot restart")

    def _explored(self, last: bool) -> Line | Raised:
        self._last = last
        line = self._line(())
        if isinstance(line, Raised):
            return line
        preferred = {}
        for number, question in enumerate(line.questions):
            other = self._line((*line.answers[:number], not line.answers[number]))
            if isinstance(other, Line) and next(joins(line, other, number)) is None:
                preferred[question.spot] = not question.answer
        self._restart(preferred)
        for number in reversed(range(len(line.questions))):
            self.branch(line, number)
        return line

    def _restart(self, preferred: Mapping[Spot, bool]) -> None:
        """Makes `root` trace all lines again with these preferred answers, except in its last attempt.  Another line then becomes
        the first line.

        A join needs a first line whose variables hold different tensors.  After `y = x`, two variables hold the same tensor."""
        if preferred and not self._last:
            self._preferred |= preferred
            raise _Restart

    @property
    def lines(self) -> list[Line]:
        """All traced lines."""
        return [line for line in self._lines.values() if isinstance(line, Line)]

    def forbid(self, line: Line, number: int, position: int) -> None:
        """Forbids the branch of a question to join at this position, because later operations need a value of only one path."""
        self._forbidden.add((line, number, position))
        self._branches = {}

    def branch(self, line: Line, number: int) -> Branch:
        """Returns the branch for the other answer to question `number` of a line."""
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
                        f"the paths return different nesting or constants: {line.result} and {other.result}",
                        "return tensors in the same structure on every path",
                    )
                return Branch(other=other, join=join)
        raise AssertionError("`joins` always yields the join at the end")

    def _check_bounded(self, line: Line, number: int, forced: tuple[bool, ...]) -> None:
        """Raises PathsRefused (data-dependent-branch) for a loop without a bound.  After TURNS equal answers at one position it
        traces the path on which this position always gets that answer.  Otherwise each number of iterations would become a line."""
        spot, answer = line.questions[number].spot, forced[number]
        earlier_answers = [question.answer for question in line.questions[:number] if question.spot == spot]
        if earlier_answers == [answer] * TURNS:
            self._trace(forced, {**self._preferred, spot: answer})

    def _closed(self, line: Line, number: int, position: int) -> bool:
        """Whether all branches between question `number` and `position` of a line join it at or before `position`."""
        inner = [at for at in range(number + 1, len(line.markers)) if line.markers[at] < position]
        inner_joins = [self.branch(line, at).join for at in reversed(inner)]
        return all(join is None or join.main <= position for join in inner_joins)

    def _line(self, forced: tuple[bool, ...]) -> Line | Raised:
        """Returns the line that begins with these answers.  Prefers later answers with which the model does not raise."""
        if forced in self._raising:
            return self._raising[forced]
        if forced not in self._lines:
            self._lines[forced] = line = self._first_not_raising(forced)
            if isinstance(line, Line):
                self._check_shapes(line)
        return self._lines[forced]

    def _check_shapes(self, line: Line) -> None:
        """Raises PathsRefused (structure-unsupported) if constant sizes of results differ from those of the first line."""
        first = self.lines[0]
        for slot in [slot for slot in line.outputs if slot[0] == "result"]:
            pair = [side.outputs.get(slot) for side in (first, line)]
            if not all(isinstance(value, Node) for value in pair):
                continue
            one, other = [value.meta["val"].shape for value in pair if isinstance(value, Node)]
            for axis, (left, right) in enumerate(zip(one, other, strict=False)):
                counted = any(("count", (slot[1], axis)) in side.outputs for side in (first, line))
                if isinstance(left, int) and isinstance(right, int) and left != right and not counted and line.questions:
                    question = line.questions[-1]
                    fix = (
                        WHILE_FIX
                        if question.line.startswith("while ")
                        else "return tensors of the same dtype and shape on every path"
                    )
                    reason = f"one path returns a tensor of shape {list(one)}, another path {list(other)}"
                    raise PathsRefused("structure-unsupported", question, reason, fix)

    def _first_not_raising(self, forced: tuple[bool, ...]) -> Line | Raised:
        """Traces paths that begin with the answers `forced`, until the model does not raise on one.  Returns its line, or the error
        if the model raises on all of them.  Changes the last answer first, as a depth-first search does."""
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
            reason = f"this loop has no known bound: it tested its condition {self._most} times"
            raise PathsRefused("data-dependent-branch", error, reason, ENDLESS) from error

    def _too_many(self) -> PathsRefused:
        places = list(dict.fromkeys([question.where for question in self._seen[1:]]))
        reason = f"there are more than {self._most} paths; further branches are at {', '.join(places[:4])}"
        return PathsRefused("data-dependent-branch", self._seen[0], reason, TOO_MANY)
