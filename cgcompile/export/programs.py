"""The exported programs of a model: one for all int_keys, or one for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram

from cgbundle.format.schema import IntKey

from .weights import weight_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """The program of every int_key, in the order of the keys, at least one.

    `dynamic`: all keys have the same program, whose declared dimensions are symbols; else each has its own, all sizes constant.
    Programs share their weights: one name means one tensor in all of them.
    """

    by_key: Mapping[IntKey, ExportedProgram]
    dynamic: bool

    def at(self, key: IntKey) -> ExportedProgram:
        """The program that runs at `key`."""
        return self.by_key[key]

    @property
    def first(self) -> ExportedProgram:
        """The only program, or that of the smallest int_key."""
        return next(iter(self.by_key.values()))

    @property
    def each(self) -> tuple[tuple[IntKey, ExportedProgram], ...]:
        """Every program once, with its first int_key."""
        found: dict[int, tuple[IntKey, ExportedProgram]] = {}
        for key, program in self.by_key.items():
            found.setdefault(id(program), (key, program))
        return tuple(found.values())

    def changed(self, change: Callable[[ExportedProgram], ExportedProgram]) -> Programs:
        """What `change` makes of every program, each changed once."""
        made = {id(program): change(program) for _, program in self.each}
        return Programs(by_key={key: made[id(program)] for key, program in self.by_key.items()}, dynamic=self.dynamic)

    def weights(self) -> dict[str, torch.Tensor]:
        """The parameters, buffers and constants of all programs, by their names in them."""
        return {name: value for _, program in self.each for name, value in weight_tensors(program).items()}
