"""Builds the tree of all paths of a model, and its merged program."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.export import ExportedProgram
from torch.fx import GraphModule

from ...errors import ModelError
from ...model.flat_module import FlatModule
from ...util.progress import Tell
from .explore import Branch, PathsRefused, TracedPaths
from .lines import Line, Raised
from .merge import Unjoinable, merged


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tree:
    """A program with a branch at every question, and the paths that were merged.  `whole`: the graph that `merged` returns."""

    program: ExportedProgram
    whole: GraphModule
    traced: TracedPaths
    root: Line

    def branches(self) -> Iterator[tuple[Line, int, Branch]]:
        """Yields every question once: its line, its number in the line, and the branch for the other answer."""
        yield from self._branches(self.root, 0, len(self.root.questions))

    def _branches(self, line: Line, start: int, stop: int) -> Iterator[tuple[Line, int, Branch]]:
        for number in range(start, stop):
            branch = self.traced.branch(line, number)
            yield line, number, branch
            if isinstance(branch.other, Line) and branch.join is not None:
                inner_questions = [at for at, marker in enumerate(branch.other.markers) if marker < branch.join.other]
                yield from self._branches(branch.other, number + 1, len(inner_questions))


def tree(flat: FlatModule, attempt: Callable[[], ExportedProgram], most: int, told_gpu: bool, tell: Tell) -> Tree | None:
    """Exports every path with `attempt`, at most `most`, and merges them.  Returns None for a model that asks no question and reads
    no number or size that depends on data.

    Raises PathsRefused, export-failed, and the errors of `attempt`."""
    numbers = itertools.count(1)

    def export_path() -> ExportedProgram:
        tell(f"torch.export, path {next(numbers)} through the model's branches")
        return attempt()

    traced = TracedPaths(flat, export_path, most)
    root = traced.root()
    if isinstance(root, Raised):
        raise ModelError("export-failed", f"{root.where or 'model'}: the model raises on every path: {root.message}")
    if not root.questions and not any(root.reads) and not any(map(any, root.sizes)):
        return None
    tell(f"torch.export of {len(traced.lines)} paths as one program")
    while True:
        try:
            program, whole = merged(traced, root, told_gpu)
            _check_assumed(traced, root)
        except Unjoinable as error:
            traced.forbid(error.line, error.number, error.position)
        except PathsRefused as error:
            raise _unbounded(traced, root) or error from error
        except ModelError:
            raise
        except Exception as error:  # torch raises many types for operations that it cannot trace in a branch
            if not root.questions:
                return None
            question = root.questions[0]
            raise _unbounded(traced, root) or PathsRefused(
                "data-dependent-branch",
                question,
                "torch cannot trace a part of a path in a branch, such as a number that is read from a tensor and used as a size",
            ) from error
        else:
            return Tree(program=program, whole=whole, traced=traced, root=root)


def _check_assumed(traced: TracedPaths, root: Line) -> None:
    """Raises PathsRefused if one line relies on its answers about sizes, and another, which may join it, could not be rewritten to
    fixed sizes."""
    if any(line.assumes for line in traced.lines) and (refused := _unbounded(traced, root)):
        raise refused


def _unbounded(traced: TracedPaths, root: Line) -> PathsRefused | None:
    """Returns the error for a line that could not be rewritten to fixed sizes, or None."""
    reasons = [line.unsupported for line in traced.lines if line.unsupported]
    if not reasons or not root.questions:
        return None
    reason = re.sub(r"\b[su]\d+\b", "?", reasons[0])  # torch's symbols of sizes
    return PathsRefused(
        "data-dependent-branch",
        root.questions[0],
        f"an operation of a path cannot be computed at the largest possible size of a selection: {reason}",
        "keep the mask: torch.where(mask, f(x), 0) instead of f(x[mask])",
    )
