"""Four small models, their bundles, and the answers of eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cgbundle
import cgcompile
from tests.helpers.models import state_models, written_models

SIZES = (1, 4)
DRAWS = 3
"""Different inputs per batch size."""

SEQUENCES, LENGTH = 4, 24
"""Sequences of calls of a model with state, and calls per sequence."""

Inputs = Callable[[int], tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A call's inputs, its expected outputs, and the expected inputs and state after it; all on the CPU."""

    batch: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    after: tuple[Tensor, ...] = ()
    state: tuple[tuple[str, Tensor], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A bundle and its right answers: `calls` are independent, `sequences` are calls in a row after `reset`. `seeded`: before
    sequence N, `seed(N)` is called. `shared`: an output is in memory of the session."""

    name: str
    path: Path
    calls: tuple[Answer, ...] = ()
    sequences: tuple[tuple[Answer, ...], ...] = ()
    seeded: bool = False
    shared: bool = False


class Rows(nn.Module):
    """Computes every row independently, so that calls may be padded and chunked."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.network = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, 24) -> (batch, 8) and the index of the largest."""
        scores = self.network(x)
        return scores, scores.argmax(1)


def rows(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 24),)


def steps(batch: int) -> tuple[Tensor, ...]:
    x, cache, _ = written_models.step(batch)
    return x, cache, torch.randint(0, written_models.PLACES, (1,))


def cases(folder: Path, device: str) -> list[Case]:
    """Returns all cases for "cpu" or "cuda", with bundles in `folder`; existing bundles are used."""
    return [
        Case(name="rows", path=_built(folder, "rows", Rows(), rows, device), calls=_calls(Rows(), rows, range(1, 10), device)),
        Case(
            name="step",
            path=_built(folder, "step", written_models.Step(), written_models.step, device),
            calls=_calls(written_models.Step(), steps, SIZES, device),
        ),
        Case(
            name="running",
            path=_built(folder, "running", state_models.running(), state_models.rows, device),
            sequences=tuple([_sequence(state_models.running(), number, device) for number in range(SEQUENCES)]),
            shared=True,
        ),
        _random_case(_built(folder, "draws", state_models.draws(), state_models.singles, device)),
    ]


def _built(folder: Path, name: str, model: nn.Module, inputs: Inputs, device: str) -> Path:
    path = folder / f"{name}-{device}.cgb"
    if not path.exists():
        record = "capture" if device == "cuda" else "auto"
        cgcompile.build(model, inputs, sizes=list(SIZES), out=path, target=device, record=record, train=True)
    return path


def _calls(model: nn.Module, inputs: Inputs, batches: Any, device: str) -> tuple[Answer, ...]:
    model = model.eval().to(device)
    return tuple([_answer(model, inputs, batch, draw, device) for batch in batches for draw in range(DRAWS)])


def _sequence(model: nn.Module, number: int, device: str) -> tuple[Answer, ...]:
    model = model.to(device)
    answers = []
    for place in range(LENGTH):
        answer = _answer(model, state_models.rows, SIZES[(number + place * place) % 2], 100 * number + place, device)
        state = tuple([(name, value.cpu().clone()) for name, value in model.named_buffers()])
        answers.append(Answer(batch=answer.batch, inputs=answer.inputs, outputs=answer.outputs, after=answer.after, state=state))
    return tuple(answers)


def _answer(model: nn.Module, inputs: Inputs, batch: int, draw: int, device: str) -> Answer:
    arguments = written_models.draw(inputs, batch, draw)
    moved = tuple([tensor.to(device, copy=True) for tensor in arguments])
    with torch.no_grad():
        returned = model(*moved)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    after = tuple([tensor.cpu() for tensor in moved])
    return Answer(batch=batch, inputs=arguments, outputs=tuple([tensor.cpu().clone() for tensor in outputs]), after=after)


def _random_case(path: Path) -> Case:
    """Returns a case with random numbers. Eager PyTorch draws other ones, so the answers come from the bundle, called by a single
    thread."""
    sequences = []
    with cgbundle.load(path) as program:
        for number in range(SEQUENCES):
            program.reset()
            program.seed(number)
            answers = []
            for place in range(LENGTH):
                batch = SIZES[(number + place) % 2]
                arguments = written_models.draw(state_models.singles, batch, place)
                outputs = tuple([torch.as_tensor(value).clone() for value in program(*arguments)])
                answers.append(Answer(batch=batch, inputs=arguments, outputs=outputs, after=arguments))
            sequences.append(tuple(answers))
    first = torch.cat([answer.outputs[0].flatten() for sequence in sequences for answer in sequence])
    assert 0.45 < first.mean() < 0.55 and len(first.unique()) > 0.9 * len(first), "these are no random numbers"
    return Case(name="draws", path=path, sequences=tuple(sequences), seeded=True)
