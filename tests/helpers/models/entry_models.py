"""A model with several entries over one key-value cache, and calls of them in random order beside eager PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import cgbundle

VOCABULARY, WIDTH, LANES, LONGEST = 64, 8, 8, 256
SIZES = {"prefill": {"seq": [64, 256]}, "decode": {"batch": [1, 8]}}
BOUND = 1e-4
"""Tolerance of float32 in FORMAT.md."""


class Lanes(nn.Module):
    """One attention layer with a cache of LANES lanes; the embedding is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("keys", torch.zeros(LANES, LONGEST, WIDTH))
        self.register_buffer("values", torch.zeros(LANES, LONGEST, WIDTH))
        self.register_buffer("length", torch.zeros(LANES, dtype=torch.int64))

    def prefill(self, ids: torch.Tensor, lane: torch.Tensor) -> torch.Tensor:
        """(seq,), (1,) -> logits of the last token, (VOCABULARY,)."""
        seq = ids.shape[0]
        query, key, value = self.mixed(self.token(ids)).chunk(3, -1)
        self.keys[lane, :seq] = key
        self.values[lane, :seq] = value
        self.length[lane] = seq
        scores = (query @ key.T * WIDTH**-0.5).masked_fill(torch.ones(seq, seq, device=ids.device).triu(1) > 0, -1e9)
        return self.head(scores[-1].softmax(-1) @ value)

    def decode(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch,), one token for each of the first lanes -> (batch, VOCABULARY)."""
        batch = ids.shape[0]
        lanes, at = torch.arange(batch, device=ids.device), self.length[:batch] % LONGEST
        query, key, value = self.mixed(self.token(ids)).chunk(3, -1)
        self.keys[lanes, at] = key
        self.values[lanes, at] = value
        hidden = torch.arange(LONGEST, device=ids.device)[None] > at[:, None]
        scores = (self.keys[:batch] @ query[:, :, None]).squeeze(-1) * WIDTH**-0.5
        mixed = scores.masked_fill(hidden, -1e9).softmax(-1)[:, None] @ self.values[:batch]
        self.length[:batch] = at + 1
        return self.head(mixed.squeeze(1))

    def reset_lane(self, lane: torch.Tensor) -> None:
        """(1,): clears a lane."""
        self.length[lane] = 0
        self.keys[lane] = 0
        self.values[lane] = 0


def lanes() -> Lanes:
    torch.manual_seed(0)
    return Lanes().eval()


def prefill_inputs(seq: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(0, VOCABULARY, (seq,)), torch.randint(0, LANES, (1,))


def decode_inputs(batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, VOCABULARY, (batch,)),)


def reset_inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, LANES, (1,)),)


ENTRIES: dict[str, Callable[..., Any]] = {"prefill": prefill_inputs, "decode": decode_inputs, "reset_lane": reset_inputs}


def calls(count: int, seed: int) -> list[tuple[str, tuple[torch.Tensor, ...]]]:
    """Returns (entry, inputs) of calls in a random order, on the CPU."""
    drawn = random.Random(seed)
    sequence = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(count):
            name = drawn.choice(list(ENTRIES))
            sizes = {dimension: drawn.choice(values) for dimension, values in SIZES.get(name, {}).items()}
            sequence.append((name, ENTRIES[name](**sizes)))
    return sequence


def check_calls(program: cgbundle.Program, model: Lanes, device: str, count: int, seed: int = 0) -> float:
    """Calls the entries in a random order beside eager PyTorch, and compares the final state. Returns the largest error."""
    worst = 0.0
    for name, inputs in calls(count, seed):
        arguments = [tensor.to(device) for tensor in inputs]
        with torch.no_grad():
            expected = getattr(model, name)(*arguments)
        got = program[name](*arguments)
        if expected is None:
            assert got is None
            continue
        assert got.shape == expected.shape and got.dtype == expected.dtype and got.device == expected.device
        worst = max(worst, error(got, expected))
        assert worst <= BOUND, (name, worst)
    for name in ("keys", "values", "length"):
        kept = program.state[name]
        assert error(torch.from_dlpack(kept), getattr(model, name).cpu()) <= BOUND, name
    return worst


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    if not got.dtype.is_floating_point:
        return 0.0 if torch.equal(got, expected) else float("inf")
    largest = float(expected.double().abs().max()) or 1.0
    return float((got.double() - expected.double()).abs().max()) / largest
