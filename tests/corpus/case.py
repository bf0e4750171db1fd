"""The record of a model in the corpus."""

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
"""A function as in a model file: the parameters are the declared dimensions."""

Made = tuple[torch.nn.Module, Inputs]

BATCH: Mapping[str, tuple[int, ...]] = {"batch": (1, 4)}
"""Recorded sizes by default; sizes between them are padded or chunked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model of the corpus. `make` returns the module and its `inputs` function, with the same weights in every process.

    `name` is `package/model`; `needs` lists the packages besides torch. `sizes` are recorded. A case may be a group: it contains
    all `members`, which run one by one if the group is not right.
    """

    name: str
    make: Callable[[], Made]
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: BATCH)
    needs: tuple[str, ...] = ()
    members: tuple[Case, ...] = ()

    @property
    def family(self) -> str:
        """Returns the group of the case in the summary."""
        return self.name.rpartition("/")[0]

    def missing(self) -> tuple[str, ...]:
        """Returns the packages that are not installed."""
        return tuple([name for name in self.needs if importlib.util.find_spec(name) is None])

    def broken(self) -> str:
        """Returns why an installed package cannot be imported, or ""."""
        for name in self.needs:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 (a package may raise anything while it is imported)
                return f"{name}: {type(error).__name__}: {error}"
        return ""

    def build(self) -> Made:
        """Returns the module in eval mode, and its inputs."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random.seed(0)
            numpy.random.seed(0)
            module, inputs = self.make()
        return module.eval(), inputs

    def between(self) -> dict[str, int]:
        """Returns a size for each dimension, at least one of which is not recorded and below the largest; {} if there is none."""
        inner_sizes = {}
        for name, sizes in self.sizes.items():
            inner = [size for size in range(sizes[0] + 1, sizes[-1]) if size not in sizes]
            inner_sizes[name] = inner[-1] if inner else sizes[-1]
        return inner_sizes if any(inner_sizes[name] not in sizes for name, sizes in self.sizes.items()) else {}


@contextmanager
def as_for(target: str) -> Iterator[None]:
    """Hides the GPU from torch in this block if `target` is cross-compiled. Some packages draw other weights if they see a GPU when
    they are imported or make a model. The builds see none, so the model must be made without one again."""
    if not target.startswith("sm_"):
        yield
        return
    cuda, other = torch.cuda, torch.accelerator
    with (
        mock.patch.object(cuda, "is_available", lambda: False), mock.patch.object(cuda, "device_count", lambda: 0),
        mock.patch.object(other, "is_available", lambda: False),
    ):  # fmt: skip
        yield
