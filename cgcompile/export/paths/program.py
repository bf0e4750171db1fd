"""The program of a model whose Python asks tensors for their truth, and what a build says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.export import ExportedProgram

from ...errors import ModelError
from ...model.flat_module import FlatModule
from ...model.side_effects import NOTHING, Obstacle, SideEffects
from ...model.source import CPU
from ..programs import Programs, coarsest
from .explore import PathsRefused
from .shown import forks
from .tree import Tree, tree
from .verify import reached, verify

MAX_PATHS = 64
"""Ways through a model's Python that are exported at most, unless the caller says otherwise."""

RAISES = "the model raises on the other answer; the bundle asserts this one"


def with_paths(
    flat: FlatModule,
    calls: Sequence[SideEffects],
    attempt: Callable[[], ExportedProgram],
    samples: Sequence[Sequence[torch.Tensor]],
    max_paths: int,
) -> tuple[ExportedProgram, tuple[Obstacle, ...]] | None:
    """The program of all ways, compared with eager PyTorch on `samples`, and notes about its questions.

    None where a way cannot be exported: what stopped the first export says why.  `calls` grows by what each call of `flat` does.
    Raises data-dependent-branch for too many ways, structure-unsupported, export-differs.
    """
    before, result = len(calls), flat.result
    flat.known, flat.asserted = frozenset(), NOTHING
    try:
        made = tree(flat, attempt, max_paths, flat.told != CPU)
        if made is None:
            return None
        bound = coarsest(Programs(by_key={(): made.program}, dynamic=False))
        verify(flat, made, samples, bound)
    except ModelError as error:
        if isinstance(error, PathsRefused) or error.code == "export-differs":
            raise
        return None
    finally:
        flat.result = result
    other = [each for call in calls[before:] for each in call.obstacles]
    return made.program, tuple(dict.fromkeys([*other, *_notes(made, samples)]))


def _notes(made: Tree, samples: Sequence[Sequence[torch.Tensor]]) -> Iterator[Obstacle]:
    """A note for every question: where both ways lead to, or that the model raises on one of them."""
    for fork in forks(made, reached(made, samples)):
        where, line = fork.question.where, fork.question.line
        if fork.raised is not None:
            yield Obstacle(rule="asserted-value", message=f"{RAISES}: {fork.raised.message}", where=where, source=line)
        yield Obstacle(rule="path", message=fork.text, where=where, source=line)
