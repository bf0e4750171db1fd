"""Formats a tree of paths as text, like PyTorch's CUDA graph trees: `Graph[0] -> Graph[1] if (y.sum() > 0)`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass

from ...model.tracing.way import Question
from .explore import TracedPaths
from .lines import Line, Raised
from .tree import Tree

Asked = tuple[bool, ...]
"""The answers before a question of a tree, which identify it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """A question, and the text of the graphs that its answers lead to.  `raised`: the error that the model raises on one answer."""

    question: Question
    text: str
    raised: Raised | None


def forks(tree: Tree, reached: Mapping[Asked, Set[bool]]) -> list[Fork]:
    """Returns a fork with a line of text for every question.  `reached`: the answers to each question with the example inputs."""
    shown = _Shown(tree.traced, reached)
    shown.along(tree.root, 0, tree.root.end, shown.new())
    return sorted(shown.forks, key=lambda fork: int(re.findall(r"\d+", fork.text)[0]))


def condition(line: str) -> str:
    """Returns the condition in a source line: `y.sum() > 0` for `if y.sum() > 0:`."""
    match = re.match(r"(?:if|elif|while|assert)\b\s*(.*?)(?::(?:\s.*)?)?$", line)
    return match[1] if match else line


def _targets(body_graphs: Mapping[bool, str], joined_graph: str, condition_text: str) -> list[str]:
    """Returns the graphs after a branch, each with its condition.  A side without operations has no graph of its own."""
    sides = [(True, f"({condition_text})"), (False, f"not ({condition_text})")]
    bodies = [(body_graphs[side], text) for side, text in sides if body_graphs[side]]
    joined = [f"then {joined_graph}"] if joined_graph else []
    if len(bodies) == 1:
        return [f"{bodies[0][0]} if {bodies[0][1]}", *(joined or ["else the end"])]
    names = [body_graphs[side] or joined_graph or "the end" for side in (True, False)]
    return [f"{names[0]} if ({condition_text})", f"{names[1]} if not", *joined]


class _Shown:
    def __init__(self, traced: TracedPaths, reached: Mapping[Asked, Set[bool]]) -> None:
        self._traced, self._reached = traced, reached
        self._graphs = 0
        self.forks: list[Fork] = []

    def new(self) -> str:
        """Returns the name of the next graph."""
        self._graphs += 1
        return f"Graph[{self._graphs - 1}]"

    def along(self, line: Line, start: int, stop: int, graph: str) -> None:
        """Adds forks for the questions of a line from number `start` to position `stop`.  `graph`: the graph before the first."""
        number = start
        while number < len(line.questions) and line.markers[number] < stop:
            question, branch = line.questions[number], self._traced.branch(line, number)
            condition_text = condition(question.line)
            number += 1
            if isinstance(branch.other, Raised):
                wrong = f"not ({condition_text})" if question.answer else f"({condition_text})"
                self.forks.append(
                    Fork(question=question, text=f"{graph} -> {branch.other.message} if {wrong}", raised=branch.other)
                )
                continue
            assert branch.join is not None
            other, join = branch.other, branch.join
            sides = {question.answer: (line, join.main), not question.answer: (other, join.other)}
            empty = {side: side_line.markers[number - 1] + 1 >= end for side, (side_line, end) in sides.items()}
            body_graphs = {side: "" if empty[side] else self.new() for side in (True, False)}
            joined_graph = "" if join.ends else self.new()
            targets = _targets(body_graphs, joined_graph, condition_text)
            answers = self._reached.get(line.answers[: number - 1], set())
            took = "both" if len(answers) == 2 else "no" if not answers else "the first" if True in answers else "the second"
            text = f"{graph} -> {', '.join(targets)}; example inputs took {took} way{'s' if took == 'both' else ''}"
            self.forks.append(Fork(question=question, text=text, raised=None))
            for side in (True, False):
                side_line, end = sides[side]
                self.along(side_line, number, end, body_graphs[side] or graph)
            if join.question is None:
                return
            number, graph = join.question, joined_graph
