"""Compares every path with eager PyTorch.  In both, the answers to the questions are forced, for any input values."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from ...errors import ModelError
from ...model.flat_module import FlatModule, ProgramModule, Reference, run_eager
from ...model.source import SEED
from ...model.tracing.way import ForcedWay, Question
from ...util.tolerance import compare
from ..higher_order.conditionals import COND, higher_order
from .explore import TracedPaths
from .lines import Line
from .tree import Tree

MOST = 64
"""Maximum number of compared paths.  Paths of a larger tree are sampled at random."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """One path through a tree.  `answers`: for each question, (the answers before it in its line, the answer to it).  `asks`,
    `reads`, `sizes`: as in TracedWay."""

    answers: tuple[tuple[tuple[bool, ...], bool], ...]
    asks: tuple[bool, ...]
    reads: tuple[bool, ...]
    sizes: tuple[tuple[Any, ...], ...]


class _Walk:
    """Follows one path of a tree.  A choice is a question on which the model raises for neither answer.  `choose(n)`: whether to
    take the other answer at choice n."""

    def __init__(self, traced: TracedPaths, choose: Callable[[int], bool]) -> None:
        self._traced, self._choose = traced, choose
        self.answers: list[tuple[tuple[bool, ...], bool]] = []
        self.asks: list[bool] = []
        self.reads: list[bool] = []
        self.sizes: list[tuple[Any, ...]] = []
        self.choices: list[bool] = []

    def along(self, line: Line, start: int, stop: int, begin: _Counts) -> bool:
        """Follows a line from question `start`, with counts `begin`, to question `stop` or its end.  Returns False if the path ends
        before `stop`."""
        number = start
        while number < min(stop, len(line.questions)):
            question = line.questions[number]
            branch = self._traced.branch(line, number)
            self._take(line, begin, _counts(question))
            begin = _counts(question)
            take_other = False
            if isinstance(branch.other, Line):
                take_other = self._choose(len(self.choices))
                self.choices.append(take_other)
            self.answers.append((line.answers[:number], question.answer != take_other))
            self.asks.append(question.answer != take_other)
            after = replace(begin, asks=begin.asks + 1)
            if not take_other:
                number, begin = number + 1, after
                continue
            assert isinstance(branch.other, Line) and branch.join is not None
            other, join = branch.other, branch.join
            joins_at = other.markers.index(join.other) if join.question is not None else len(other.questions)
            if not self.along(other, number + 1, joins_at, after) or join.question is None:
                return False
            number, begin = join.question, _counts(line.questions[join.question])
        last = _counts(line.questions[stop]) if stop < len(line.questions) else None
        self._take(line, begin, last)
        return last is not None

    def _take(self, line: Line, begin: _Counts, end: _Counts | None) -> None:
        self.asks += line.asks[begin.asks : end.asks if end else None]
        self.reads += line.reads[begin.reads : end.reads if end else None]
        self.sizes += line.sizes[begin.sizes : end.sizes if end else None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counts:
    """How many answers, numbers and sizes Python read before a point of a line."""

    asks: int = 0
    reads: int = 0
    sizes: int = 0


def _counts(question: Question) -> _Counts:
    return _Counts(asks=question.asks, reads=question.reads, sizes=question.sizes)


def paths(tree: Tree, most: int = MOST) -> Iterator[Path]:
    """Yields the paths of a tree on which the model does not raise, at most `most`."""
    seen: set[tuple[bool, ...]] = set()
    pending: list[tuple[bool, ...]] = [()]
    rng = random.Random(0)
    while pending and len(seen) < most:
        prefix = pending.pop(rng.randrange(len(pending)))
        walk = _Walk(tree.traced, lambda at, prefix=prefix: prefix[at] if at < len(prefix) else False)  # type: ignore[misc]
        walk.along(tree.root, 0, len(tree.root.questions), _Counts())
        choices = tuple(walk.choices)
        if choices in seen:
            continue
        seen.add(choices)
        pending += [(*choices[:at], True) for at in range(len(prefix), len(choices))]
        yield Path(answers=tuple(walk.answers), asks=tuple(walk.asks), reads=tuple(walk.reads), sizes=tuple(walk.sizes))


class _ForcedModule(torch.nn.Module):
    """The program with forced answers.  `taken`: the answers before a question in its line -> the answer to it."""

    def __init__(self, module: ProgramModule, tree: Tree, taken: Mapping[tuple[bool, ...], bool]) -> None:
        super().__init__()
        self.snapshot = module.snapshot
        self._program: Any = module.programs[0]
        questions = [node.meta.get("question") for node in conditionals(tree.whole)]
        branches = list(conditionals(self._program))
        if len(branches) != len(questions):
            raise ModelError("export-failed", "the numbers of branches in the program and the model differ")
        self._taken = {
            node: taken.get(question) for node, question in zip(branches, questions, strict=True) if question is not None
        }

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result: tuple[torch.Tensor, ...] = tuple(_Forced(self._program, self._taken).run(*tensors))
        return result


class _Forced(Interpreter):
    def __init__(self, module: Any, taken: Mapping[Node, bool | None]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._taken = taken

    def run_node(self, node: Node) -> Any:
        if node in self._taken:
            _, true, false, operands = [self._operands(argument) for argument in node.args]
            return _Forced(true if self._taken[node] else false, self._taken).run(*operands)
        if node.target in (torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default):
            return None
        return super().run_node(node)

    def _operands(self, value: Any) -> Any:
        return torch.fx.node.map_arg(value, lambda node: self.env[node])


class _Noting(Interpreter):
    """Runs a program, and records the answers of its branches."""

    def __init__(self, module: Any, questions: Mapping[Node, Any], answers: dict[Any, set[bool]]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._questions, self._answers = questions, answers

    def run_node(self, node: Node) -> Any:
        if self._questions.get(node) is None:
            return super().run_node(node)
        value, true, false, operands = [torch.fx.node.map_arg(argument, lambda inner: self.env[inner]) for argument in node.args]
        self._answers.setdefault(self._questions[node], set()).add(bool(value))
        return _Noting(true if value else false, self._questions, self._answers).run(*operands)


def reached(tree: Tree, samples: Sequence[Sequence[torch.Tensor]]) -> dict[tuple[bool, ...], set[bool]]:
    """Runs the program with these inputs.  Returns {answers before a question: answers to it}."""
    answers: dict[tuple[bool, ...], set[bool]] = {}
    module = ProgramModule([tree.program])
    program: Any = module.programs[0]
    branches, questions = list(conditionals(program)), [node.meta.get("question") for node in conditionals(tree.whole)]
    noting = _Noting(program, dict(zip(branches, questions, strict=True)), answers)
    for tensors in samples:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            noting.run(*[tensor.clone() for tensor in tensors])
        module.snapshot.restore()
    return answers


def conditionals(module: GraphModule) -> Iterator[Node]:
    """Yields the branches of a program, each before the branches in its bodies."""
    for node in module.graph.nodes:
        if higher_order(node) == COND:
            yield node
            for body in node.args[1:3]:
                yield from conditionals(getattr(module, str(body.target)))


def verify(flat: FlatModule, tree: Tree, samples: Sequence[Sequence[torch.Tensor]], bound: float) -> int:
    """Compares every path with eager PyTorch.  Returns the number of paths on which the model raises with all samples, so that they
    could not be compared.  Raises export-differs and data-dependent-branch, with the answers of the path."""
    exported = ProgramModule([tree.program])
    not_compared = 0
    for path in paths(tree):
        forced = _ForcedModule(exported, tree, dict(path.answers))
        compared = False
        for tensors in samples:
            way = ForcedWay(asks=iter(path.asks), reads=iter(path.reads), sizes=iter(path.sizes))
            before, flat.way = flat.way, way
            try:
                expected = _seeded(flat, tensors)
            except ModelError:
                raise
            except Exception:  # noqa: BLE001  the model raises for these input values on this path
                continue
            finally:
                flat.way = before
            if not way.ended():
                raise ModelError(
                    "data-dependent-branch", f"{_path_text(tree, path)}: eager PyTorch reads other values than the trace"
                )
            if _differ(expected, _seeded(forced, tensors), bound):
                raise ModelError("export-differs", f"{_path_text(tree, path)}: the program computes another result than the model")
            compared = True
        not_compared += not compared
    return not_compared


def _path_text(tree: Tree, path: Path) -> str:
    if not tree.root.questions:
        return "model"
    first = tree.root.questions[0]
    return f"{first.where}: the path of the answers {', '.join([str(answer) for _, answer in path.answers])}"


def _seeded(reference: Reference, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Runs a call with a fixed seed.  Returns the outputs, the inputs after the call, and the buffers."""
    with torch.random.fork_rng(devices=sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})):
        torch.manual_seed(SEED)
        run = run_eager(reference, tensors)
    return [*run.outputs, *run.inputs, *[run.state[name] for name in sorted(run.state)]]


def _differ(expected: Sequence[torch.Tensor], computed: Sequence[torch.Tensor], bound: float) -> bool:
    return len(expected) != len(computed) or any(
        want.shape != got.shape or compare(want, got).error > bound for want, got in zip(expected, computed, strict=False)
    )
