"""A model whose entries donate tensors, encode -> step -> step ... -> score, and one entry without donations."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

FEATURES, WIDTH, WORDS = 16, 32, 12
SIZES = ["encode:batch=2,8", "encode:seq=4,16", "step:batch=2,8", "score:batch=2,8", "other:rows=64"]
DONATIONS = [
    ("encode.output", "step.hidden"),
    ("step.hidden", "step.hidden"),
    ("step.hidden", "score.hidden"),
    ("encode", "score.hidden"),
    ("step.logits", "score.logits"),
]
BOUND = 1e-4


class Donated(nn.Module):
    """A recurrent network with four methods."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.mixed = nn.Linear(FEATURES, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.token, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, FEATURES) -> (batch, WIDTH)."""
        return self.read(x).tanh().mean(1)

    def step(self, hidden: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """(batch, WIDTH), (batch,) -> the next hidden state, and logits (batch, WORDS)."""
        following = self.mixed(torch.cat([hidden, self.token(ids)], 1)).tanh()
        return {"hidden": following, "logits": self.head(following)}

    def score(self, logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, WORDS), (batch, WIDTH) -> (batch,)."""
        return logits.softmax(1).amax(1) + hidden.mean(1)

    def other(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, FEATURES) -> (rows,); its temporaries are larger than those of the other entries."""
        return (self.read(x) @ self.read(x).T).softmax(1)[:, 0]


def donated() -> Donated:
    torch.manual_seed(0)
    return Donated().eval()


def encode_inputs(batch: int, seq: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, seq, FEATURES),)


def step_inputs(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, WIDTH), torch.randint(0, WORDS, (batch,))


def score_inputs(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, WORDS), torch.randn(batch, WIDTH)


def other_inputs(rows: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(rows, FEATURES),)


ENTRIES = {"encode": encode_inputs, "step": step_inputs, "score": score_inputs, "other": other_inputs}


def check_donations(program: Any, device: str, count: int, seed: int = 0, mixed: bool = True) -> float:
    """Calls the entries in random order, with donated or copied outputs, beside eager PyTorch. Returns the largest error. `program`
    must be loaded with outputs="view". Between two calls the arena is filled with NaN, except the ranges of donated outputs. With
    `mixed`, some inputs are copies, which a call cannot use in place.
    """
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    model, worst = donated().to(device), 0.0

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    def argument(view: Any) -> Any:
        return view.tensor.clone() if mixed and drawn.random() < 0.3 else view.tensor if drawn.random() < 0.3 else view

    def compared(view: Any, expected: torch.Tensor) -> Any:
        nonlocal worst
        worst = max(worst, float((view.tensor - expected).abs().max()))
        assert worst <= BOUND, worst
        return view

    def between() -> None:
        program.poison(0xFF, reserved=False)
        if drawn.random() < 0.4:
            x = fresh(64, FEATURES)
            compared(program.other(x), model.other(x))

    with torch.no_grad():
        for _ in range(count):
            batch, x = drawn.choice([2, 8]), None
            program.poison(0xFF)
            x = fresh(batch, drawn.choice([4, 16]), FEATURES)
            first, hidden = compared(program.encode(x), expected := model.encode(x)), expected
            between()
            passed = first
            for _ in range(drawn.randrange(1, 4)):
                ids = torch.randint(0, WORDS, (batch,), generator=generator).to(device)
                outputs, wanted = program.step(argument(passed), ids), model.step(hidden, ids)
                passed, logits, hidden = compared(outputs["hidden"], wanted["hidden"]), outputs["logits"], wanted["hidden"]
                between()
            which, plain = (first, expected) if drawn.random() < 0.5 else (passed, hidden)
            compared(
                program.score(argument(compared(logits, wanted["logits"])), argument(which)), model.score(wanted["logits"], plain)
            )
            compared(first, expected)
    return worst
