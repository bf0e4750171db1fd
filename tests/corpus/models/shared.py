"""Inputs and helper functions that the packages share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..case import BATCH, Case, Inputs, Made

VOCABULARY, TOKENS = 500, 16


def named(**makers: Callable[[int], torch.Tensor]) -> Inputs:
    """Returns an inputs function that makes each input from the batch size, by name."""

    def inputs(batch: int) -> dict[str, torch.Tensor]:
        return {name: make(batch) for name, make in makers.items()}

    return inputs


def ids(tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> Callable[[int], torch.Tensor]:
    """Draws token ids, without the special ones below 5."""
    return lambda batch: torch.randint(5, vocabulary, (batch, tokens))


def zeros(*shape: int) -> Callable[[int], torch.Tensor]:
    """Returns zeros as int64."""
    return lambda batch: torch.zeros(batch, *shape, dtype=torch.int64)


def ones(*shape: int) -> Callable[[int], torch.Tensor]:
    """Returns ones as int64: a mask that hides nothing."""
    return lambda batch: torch.ones(batch, *shape, dtype=torch.int64)


def noise(*shape: int) -> Callable[[int], torch.Tensor]:
    """Draws normal random floats."""
    return lambda batch: torch.randn(batch, *shape)


def fractions(*shape: int) -> Callable[[int], torch.Tensor]:
    """Draws floats from 0 to 1."""
    return lambda batch: torch.rand(batch, *shape)


def tokens(count: int = TOKENS) -> Inputs:
    """Returns token ids and a mask, as a tokenizer does."""
    return named(input_ids=ids(count), attention_mask=ones(count))


def only_ids(count: int = TOKENS) -> Inputs:
    """Returns only token ids."""
    return named(input_ids=ids(count))


def pixels(side: int, channels: int = 3) -> Inputs:
    """Returns random images."""
    return named(pixel_values=noise(channels, side, side))


def transformer(
    name: str, model: str, config: str, inputs: Inputs, sizes: Mapping[str, tuple[int, ...]] = BATCH, **options: Any
) -> Case:
    """Returns a case of a transformers class with a small configuration; options of nested configurations are dicts."""

    def make() -> Made:
        package = importlib.import_module("transformers")
        return getattr(package, model)(getattr(package, config)(**options)), inputs

    return Case(name=f"transformers/{name}", make=make, sizes=sizes, needs=("transformers",))
