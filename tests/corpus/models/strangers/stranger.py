"""How a model of a package that is not among those of `tests.corpus.models` becomes a case."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...case import Case, Inputs, Made

Draw = Callable[[int], torch.Tensor]
"""A tensor for a batch size."""

BATCH: Mapping[str, tuple[int, ...]] = {"batch": (1, 3)}
"""The sizes that are built unless a case says otherwise."""


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
    """A case of the class or function `target`, written `package.module:Class`, which is called with `arguments` and `options`.

    `inputs` is the model file's function of that name; without it the `draws` give the tensors by position.  `wrapped` puts the
    model into a module that asks for one tensor of a result.  `needs` are packages beside the one of `target`.
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
    """A case whose model takes more than one call to make.  `name` is `package.model`."""
    return Case(name=f"strangers/{field}/{name}", make=make, sizes=sizes, needs=tuple(needs) or (name.partition(".")[0],))


def integers(high: int, *shape: int) -> Draw:
    """Integers from 0 to below `high`."""
    return lambda batch: torch.randint(0, high, (batch, *shape))


def positive(*shape: int) -> Draw:
    """Floats from 0.1 to 1.1."""
    return lambda batch: torch.rand(batch, *shape) + 0.1


def constant(value: float, *shape: int) -> Draw:
    """Floats that are all the same."""
    return lambda batch: torch.full((batch, *shape), value)


def same(*shape: int) -> Draw:
    """Floats of the normal distribution whose shape has no batch."""
    return lambda batch: torch.randn(*shape)
