"""What a model of the corpus is."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy
import torch

Inputs = Callable[..., Any]
"""As in a model.py: the parameters are the declared dimensions."""

Made = tuple[torch.nn.Module, Inputs]

BATCH: Mapping[str, tuple[int, ...]] = {"batch": (1, 4)}
"""Sizes that are recorded unless a case says otherwise; those between them are padded or chunked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model: `make` gives the module and its `inputs`, with the same weights in every process.

    `name` is `package/model`, `needs` the packages beside torch.  `sizes` are recorded.  `members` are the cases that
    are tried one by one where this one, which holds them all, is not right.
    """

    name: str
    make: Callable[[], Made]
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: BATCH)
    needs: tuple[str, ...] = ()
    members: tuple[Case, ...] = ()

    @property
    def family(self) -> str:
        """What the summary counts together."""
        return self.name.rpartition("/")[0]

    def missing(self) -> tuple[str, ...]:
        """The packages that are not installed."""
        return tuple([name for name in self.needs if importlib.util.find_spec(name) is None])

    def broken(self) -> str:
        """Why a package that is installed cannot be imported, "" where all can be."""
        for name in self.needs:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 (a package may raise anything while it is imported)
                return f"{name}: {type(error).__name__}: {error}"
        return ""

    def build(self) -> Made:
        """The module in eval mode, and its inputs."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random.seed(0)
            numpy.random.seed(0)
            module, inputs = self.make()
        return module.eval(), inputs

    def between(self) -> dict[str, int]:
        """A size per dimension that is not recorded, but lies below the largest; {} where there is none."""
        inner_sizes = {}
        for name, sizes in self.sizes.items():
            inner = [size for size in range(sizes[0] + 1, sizes[-1]) if size not in sizes]
            inner_sizes[name] = inner[-1] if inner else sizes[-1]
        return inner_sizes if any(inner_sizes[name] not in sizes for name, sizes in self.sizes.items()) else {}


@contextmanager
def as_for(target: str) -> Iterator[None]:
    """Meanwhile torch finds a GPU only where one is built for that is here: packages ask, when they are imported and when a model
    is made, and draw other weights then.  What is cross-compiled is made where no GPU is, and has to be made so again."""
    if not target.startswith("sm_"):
        yield
        return
    cuda, other = torch.cuda, torch.accelerator
    with (
        mock.patch.object(cuda, "is_available", lambda: False), mock.patch.object(cuda, "device_count", lambda: 0),
        mock.patch.object(other, "is_available", lambda: False),
    ):  # fmt: skip
        yield
