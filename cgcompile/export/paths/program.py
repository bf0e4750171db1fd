"""Exports all paths of a model whose Python branches on tensors, as one verified program, with notes for the build's findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set

import torch
from torch.export import ExportedProgram

from ...errors import ModelError
from ...model.flat_module import FlatModule
from ...model.side_effects import ASSIGNED, BRANCH, NOTHING, SIZE_FIX, SIZED, Obstacle, SideEffects
from ...model.source import CPU
from ...model.tracing.attributes import assignment_place
from ...model.user_code import called_by, text_of, user_place
from ...util.progress import Tell
from ..programs import Programs, coarsest
from .explore import PathsRefused
from .lines import TORCH_STOPS
from .shown import forks
from .tree import Tree, tree
from .verify import reached, verify


class WayStopped(Exception):
    """torch cannot trace an operation on a path that the model's Python can take.  It is the cause of a ModelError.

    `obstacle`: has the user's line.  `__cause__`: torch's error.
    """

    def __init__(self, obstacle: Obstacle, cause: BaseException) -> None:
        super().__init__(obstacle.message)
        self.obstacle, self.__cause__ = obstacle, cause


RAISES = "the model raises on the other answer; the bundle asserts this one"


def with_paths(
    flat: FlatModule,
    calls: Sequence[SideEffects],
    attempt: Callable[[], ExportedProgram],
    samples: Sequence[Sequence[torch.Tensor]],
    max_paths: int,
    tell: Tell,
) -> tuple[ExportedProgram, tuple[Obstacle, ...]] | None:
    """Returns the program of all paths, verified against eager PyTorch on `samples`, and notes about its questions.

    Returns None if there is no such program; the error of the first export has the reason.  `calls`: each call of `flat` appends
    its side effects.  Raises data-dependent-branch for too many paths, structure-unsupported, export-differs.  An error of torch
    on a path becomes a ModelError whose cause is WayStopped.
    """
    before, result, assigned = len(calls), flat.result, flat.assigned
    flat.known, flat.asserted = frozenset(), NOTHING
    try:
        joined = tree(flat, attempt, max_paths, flat.target_device != CPU, tell)
        if joined is None:
            return None
        bound = coarsest(Programs(by_key={(): joined.program}, dynamic=False))
        names = sorted({name for line in joined.traced.lines for name in line.changed} - {*flat.assigned})
        flat.assigned = (*assigned, *names)
        tell("every path in eager PyTorch")
        not_compared = verify(flat, joined, samples, bound)
    except PathsRefused as refused:
        code, why = refused.code, refused.obstacle
        raise ModelError(code, f"{why.where}: {code}: {why.message}: {why.source}", refused.hint) from refused
    except ModelError as error:
        if error.code == "export-differs":
            raise
        if isinstance(error.__cause__, TORCH_STOPS):
            stopped, obstacle = _stopped(error, error.__cause__)
            raise stopped from WayStopped(obstacle, error.__cause__)
        return None
    finally:
        flat.result, flat.assigned = result, assigned
    other = [obstacle for call in calls[before:] for obstacle in call.obstacles]
    early = set().union(*[call.early for call in calls[before:]])
    return joined.program, tuple(dict.fromkeys([*other, *_changes(flat, names, early), *_notes(joined, samples, not_compared)]))


def _stopped(error: ModelError, cause: BaseException) -> tuple[ModelError, Obstacle]:
    """Returns the error and obstacle for a line that torch cannot trace on a path.  If torch needs the value of an integer, the
    line uses the integer as a size, except in `range()`."""
    where, line = user_place(cause)
    if error.code == "data-dependent-shape" or "extract specialized integer" not in text_of(cause) or "range(" in line:
        plain = ModelError(error.code, str(error), error.hint)
        return plain, Obstacle(rule="data-dependent-branch", message=BRANCH, where=where, source=line)
    message = SIZED + called_by(cause)
    sized = ModelError("data-dependent-shape", f"{where}: {message}: {line}", SIZE_FIX)
    return sized, Obstacle(rule="data-dependent-branch", message=message, where=where, source=line)


def _changes(flat: FlatModule, names: Sequence[str], early: Set[str]) -> Iterator[Obstacle]:
    """Yields obstacles for attributes that only paths outside the first calls change.  `early`: names that a path reads before
    it assigns them."""
    for name in names:
        where, line = assignment_place(flat.model, name)
        rule = "mutated-attribute" if name in early else ASSIGNED
        yield Obstacle(rule=rule, message=f"forward() changes {name!r}", where=where, source=line)


def _notes(joined: Tree, samples: Sequence[Sequence[torch.Tensor]], not_compared: int) -> Iterator[Obstacle]:
    """Yields a note for every question, with the graphs of both answers or the error that one of them raises.  Yields a further
    note if some paths could not be compared."""
    if not_compared and joined.root.questions:
        first = joined.root.questions[0]
        message = f"{not_compared} of the paths could not be compared with eager PyTorch: the model raises on example inputs there"
        yield Obstacle(rule="path", message=message, where=first.where, source=first.line)
    for fork in forks(joined, reached(joined, samples)):
        where, line = fork.question.where, fork.question.line
        if fork.raised is not None:
            yield Obstacle(rule="asserted-value", message=f"{RAISES}: {fork.raised.message}", where=where, source=line)
        yield Obstacle(rule="path", message=fork.text, where=where, source=line)
