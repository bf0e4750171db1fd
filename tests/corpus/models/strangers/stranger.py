"""Makes cases from models of packages that `tests.corpus.models` does not cover."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...case import Case, Inputs, Made

Draw = Callable[[int], torch.Tensor]
"""Draws a tensor for a batch size."""

BATCH: Mapping[str, tuple[int, ...]] = {"batch": (1, 3)}
"""Sizes that are built by default."""


def stranger(
    field: str,
    target: str,
    *draws: Draw,
    variant: str = "",
    arguments: Sequence[Any] = (),
    inputs: Inputs | None = None,
    wrapped: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
    sizes: Mapping[str, tuple[int, ...]] = BATCH,
    needs: Sequence[str] = (),
    **options: Any,
) -> Case:
    """Returns a case of the class or function `target`, written `package.module:Class`, made with `arguments` and `options`.

    `inputs` is the function of this name in a model file; without it the `draws` make the tensors by position. `wrapped` wraps the
    model in a module that returns one tensor of the result. `needs` lists packages besides that of `target`.
    """
    module, _, path = target.partition(":")
    package = module.partition(".")[0]

    def make() -> Made:
        maker = getattr(importlib.import_module(module), path)
        model = maker(*arguments, **options)
        return wrapped(model) if wrapped else model, inputs or (lambda batch: tuple([draw(batch) for draw in draws]))

    return model_case(field, f"{package}.{variant or path}", make, (package, *needs), sizes)


def model_case(
    field: str, name: str, make: Callable[[], Made], needs: Sequence[str] = (), sizes: Mapping[str, tuple[int, ...]] = BATCH
) -> Case:
    """Returns a case whose model needs more than one call to make. `name` is `package.model`."""
    return Case(name=f"strangers/{field}/{name}", make=make, sizes=sizes, needs=tuple(needs) or (name.partition(".")[0],))


def integers(high: int, *shape: int) -> Draw:
    """Draws integers from 0 to `high` - 1."""
    return lambda batch: torch.randint(0, high, (batch, *shape))


def positive(*shape: int) -> Draw:
    """Draws floats from 0.1 to 1.1."""
    return lambda batch: torch.rand(batch, *shape) + 0.1


def constant(value: float, *shape: int) -> Draw:
    """Returns floats that are all `value`."""
    return lambda batch: torch.full((batch, *shape), value)


def same(*shape: int) -> Draw:
    """Draws normal random floats without a batch dimension."""
    return lambda batch: torch.randn(*shape)
