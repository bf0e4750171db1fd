"""What was captured of a region: graphs, and between them the conditions, branches and loops that their nodes will be in one graph.
A recorder process follows them as the host does, which is what the graph will be held to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ...targets.cuda.tensors import TensorPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class SetCondition:
    """The byte there becomes the condition of branch or loop number `conditional`."""

    conditional: int
    byte: TensorPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditional:
    """A branch or a loop, `type` as in ConditionalNode, and what its bodies do."""

    conditional: int
    type: str
    bodies: tuple[Steps, ...]


Step: TypeAlias = torch.cuda.CUDAGraph | SetCondition | Conditional
Steps: TypeAlias = tuple[Step, ...]


def graphs(steps: Sequence[Step]) -> Iterator[torch.cuda.CUDAGraph]:
    """All graphs, those of bodies too."""
    for step in steps:
        if isinstance(step, Conditional):
            for body in step.bodies:
                yield from graphs(body)
        elif not isinstance(step, SetCondition):
            yield step


def replay(steps: Sequence[Step]) -> None:
    """Runs instantiated graphs in order; where a condition is set, the host waits for it."""
    _replay(steps, {})


def _replay(steps: Sequence[Step], conditions: dict[int, int]) -> None:
    for step in steps:
        if isinstance(step, SetCondition):
            conditions[step.conditional] = condition(step.byte)
        elif isinstance(step, Conditional):
            while step.type == "while" and conditions[step.conditional]:
                _replay(step.bodies[0], conditions)
            if step.type != "while":
                value = conditions[step.conditional]
                _replay(step.bodies[value if step.type == "switch" else int(not value)], conditions)
        else:
            step.replay()


def condition(byte: TensorPlace) -> int:
    """The byte, which is an element of a tensor of the GPU."""
    return int(byte.tensor().item())
