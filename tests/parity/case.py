"""A case of the corpus: a small model, its inputs, and the rules that it breaks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = Callable[..., Any]
"""As in a model file: the parameters are the declared dimensions."""

RULES = (
    "host-scalar", "assert-scalar", "data-dependent-branch", "data-dependent-shape", "data-dependent-select",
    "data-dependent-follower", "cpu-operation", "device-copy", "several-devices", "pinned-memory", "control-flow",
    "random-operation", "rng-state-operation", "incompatible-operator", "boolean-index-put", "sparse-output",
    "deterministic-scatter", "cudagraph-unsafe", "custom-operator", "fallback-op", "mutated-buffer", "mutated-input",
    "overlapping-input", "non-tensor-input", "aliased-output", "too-many-keys", "small-region", "training-mode",
    "path", "baked-weight",
)  # fmt: skip
"""Names of the rules, as a user types them for --allow."""

SIZES = (2, 4)
"""The sizes of every declared dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and its expected verdict.

    `make` returns a new module and the function for its inputs.  `expected`: exactly the names of all rules that it breaks, or the
    code of the error with which export refuses it.  `near`: rules that it almost breaks.  `kind`: its group.
    `file`: the file of the model.  `deterministic`: run with torch.use_deterministic_algorithms.
    `fallback_ops`: operators that the user names with --fallback-op.
    """

    name: str
    make: Callable[[], tuple[nn.Module, Inputs]]
    expected: frozenset[str]
    near: frozenset[str]
    kind: str
    file: str
    deterministic: bool = False
    fallback_ops: tuple[str, ...] = ()


def case(
    model: type[nn.Module],
    inputs: Inputs,
    *expected: str,
    kind: str,
    near: tuple[str, ...] = (),
    training: bool = False,
    deterministic: bool = False,
    fallback_ops: tuple[str, ...] = (),
) -> Case:
    """Returns a case named after `model`, a class of modules."""

    def make() -> tuple[nn.Module, Inputs]:
        return model().train(training), inputs

    return Case(
        name="".join([f"-{letter.lower()}" if letter.isupper() else letter for letter in model.__name__]).strip("-"),
        make=make,
        expected=frozenset(expected),
        near=frozenset(near),
        kind=kind,
        file=str(sys.modules[model.__module__].__file__),
        deterministic=deterministic,
        fallback_ops=fallback_ops,
    )


# --- inputs ---------------------------------------------------------------------------------------------------


def rows(batch: int) -> tuple[torch.Tensor]:
    """float32 [batch, 8]."""
    return (torch.randn(batch, 8),)


def two(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [batch, 8] twice."""
    return torch.randn(batch, 8), torch.randn(batch, 8)


def tokens(batch: int) -> tuple[torch.Tensor]:
    """Token ids: int64 [batch, 6], below 16."""
    return (torch.randint(0, 16, (batch, 6)),)


def sequences(batch: int) -> tuple[torch.Tensor]:
    """float32 [batch, 6, 8]: 6 tokens of width 8."""
    return (torch.randn(batch, 6, 8),)


def ragged(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [batch, 6, 8] and the lengths, int64 [batch], 1 to 6, in falling order."""
    return torch.randn(batch, 6, 8), torch.arange(batch).flip(0) % 6 + 1


def images(batch: int) -> tuple[torch.Tensor]:
    """float32 [batch, 3, 8, 8]."""
    return (torch.randn(batch, 3, 8, 8),)


def boxes(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Boxes, float32 [batch, 5, 4], and their scores, float32 [batch, 5]."""
    return torch.rand(batch, 5, 4), torch.rand(batch, 5)
