"""The captured steps of a region: graphs, and between them conditions, branches and loops.  The bundle joins them into one graph.
A recorder process replays them with host control flow, as the reference for that graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ...targets.cuda.tensors import TensorPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class SetCondition:
    """Sets the condition of branch or loop number `conditional` to a byte of a tensor."""

    conditional: int
    byte: TensorPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditional:
    """A branch or a loop with the steps of its bodies.  `type`: as in ConditionalNode."""

    conditional: int
    type: str
    bodies: tuple[Steps, ...]


Step: TypeAlias = torch.cuda.CUDAGraph | SetCondition | Conditional
Steps: TypeAlias = tuple[Step, ...]


def graphs(steps: Sequence[Step]) -> Iterator[torch.cuda.CUDAGraph]:
    """Yields all graphs, also those in bodies."""
    for step in steps:
        if isinstance(step, Conditional):
            for body in step.bodies:
                yield from graphs(body)
        elif not isinstance(step, SetCondition):
            yield step


def replay(steps: Sequence[Step]) -> None:
    """Replays instantiated graphs in order.  The host waits for every condition."""
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
    """Reads the condition byte from the GPU."""
    return int(byte.tensor().item())
