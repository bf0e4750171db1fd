"""The user's model over flat tensors: what is exported, and what eager PyTorch is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.export import ExportedProgram

from cgbundle.format.schema import Tree

from ..errors import ModelError
from ..util.raw_bytes import raw
from .device_tracking import placing
from .pytree import Leaf, describe, rebuild
from .side_effects import Run
from .source import Sample

PREFIX = "model."
"""The wrapper's name for the user's module, taken off every weight's name."""


def nobody(run: Run) -> None:
    """Nobody watches."""


class Flat(torch.nn.Module):
    """The user's module over flat tensors: a tuple of tensors in, a tuple of tensors out.  After a call, `result`
    and `names` say what it gave.  `watch` is told the Run of each call before it begins; a trace goes as `run`, a call with real
    tensors, did, and takes the reads from it that `known` names (see placing.py)."""

    __module__ = "cgcompile.flat"  # stored programs name it: they must not change with the place of this file

    def __init__(self, model: torch.nn.Module, like: Sample) -> None:
        super().__init__()
        self.model = model
        self.like = like
        self.result: Tree | None = None
        self.names: list[str] = []
        self.run = Run()
        self.known: frozenset[int] = frozenset()
        self.watch: Callable[[Run], None] = nobody
        self.kept = Kept(model)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        trees = dict(self.like.call["call"])
        names = iter(trees)
        args = [rebuild(trees[next(names)], list(tensors), value) for value in self.like.args]
        kwargs = {name: rebuild(trees[name], list(tensors), value) for name, value in self.like.kwargs.items()}
        leaves: list[Leaf] = []
        before = [(owner, leaf, owner._buffers[leaf]) for owner, leaf in self.kept.places()]
        with placing(tensors, self.run, self.known) as run:
            self.watch(run)
            made = self.model(*args, **kwargs)
        for owner, leaf, tensor in before:
            _written_back(owner, leaf, tensor)
        self.result = describe(made, "", leaves)
        self.names = [name or "output" for name, _ in leaves]
        return tuple([tensor for _, tensor in leaves])


def _written_back(owner: Any, leaf: str, tensor: torch.Tensor) -> None:
    """Makes a buffer that forward() assigned (`self.steps = self.steps + 1`) a write to the one that was there: torch.export drops
    assignments in modules below the outermost one (seen with 2.11 and 2.13).  Raises state-changed for one of another kind."""
    now = owner._buffers[leaf]
    if now is tensor:
        return
    if now is None or now.shape != tensor.shape or now.dtype != tensor.dtype:
        got = "None" if now is None else f"{now.dtype} {list(now.shape)}"
        raise ModelError(
            "state-changed", f"forward() assigns {got} to the buffer {leaf!r}, which is {tensor.dtype} {list(tensor.shape)}"
        )
    tensor.copy_(now)
    owner._buffers[leaf] = tensor


class Eager(Protocol):
    """What `run_writing` runs: a Flat, or a Computed."""

    kept: Kept

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]: ...


class Computed(torch.nn.Module):
    """A program in place of the user's module, for models whose random numbers the program computes itself: eager PyTorch draws
    others.  `prefix` is the program's in front of the user's names."""

    def __init__(self, program: ExportedProgram, prefix: str) -> None:
        super().__init__()
        self.program = program.module(check_guards=False)
        self.kept = Kept(self.program, prefix)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.program(*tensors))


class Kept:
    """What the buffers of a module hold at first, so that runs of the model leave no trace in it: a model may write to them, or
    assign others.  Names are without `prefix`."""

    def __init__(self, module: torch.nn.Module, prefix: str = "") -> None:
        self._rows: list[tuple[str, Any, str, torch.Tensor, torch.Tensor]] = []
        for path, owner in module.named_modules():
            for leaf, tensor in owner._buffers.items():
                if tensor is not None:
                    name = (f"{path}.{leaf}" if path else leaf).removeprefix(prefix)
                    self._rows.append((name, owner, leaf, tensor, tensor.detach().clone()))

    def places(self) -> list[tuple[Any, str]]:
        """(module, name in it) of every buffer."""
        return [(owner, leaf) for _, owner, leaf, _, _ in self._rows]

    def homes(self) -> set[int]:
        """The storages of all buffers."""
        return {owner._buffers[leaf].untyped_storage().data_ptr() for _, owner, leaf, _, _ in self._rows}

    def now(self) -> dict[str, torch.Tensor]:
        """Copies of what all buffers hold, by their names in the module."""
        return {name: owner._buffers[leaf].detach().clone() for name, owner, leaf, _, _ in self._rows}

    def restore(self) -> None:
        """Puts everything back."""
        with torch.no_grad():
            for _, owner, leaf, tensor, first in self._rows:
                owner._buffers[leaf] = tensor
                if not _same(tensor, first):
                    tensor.copy_(first)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape hold the same bytes."""
    return torch.equal(raw(one), raw(other))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """A run of eager PyTorch: its outputs, what copies of the inputs hold after it (an output may be one of these), and what the
    buffers hold, by their names in the user's module."""

    outputs: tuple[torch.Tensor, ...]
    given: tuple[torch.Tensor, ...]
    state: Mapping[str, torch.Tensor]


def run_eager(flat: Eager, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs of eager PyTorch.  Inputs are copied first: a model may write to them."""
    return run_writing(flat, tensors).outputs


def run_writing(flat: Eager, tensors: Sequence[torch.Tensor], calls: int = 1) -> Ran:
    """Runs eager PyTorch on copies of the inputs so many times, from the buffers' first contents, which are put back at the end;
    tells of the last run."""
    outputs: tuple[torch.Tensor, ...] = ()
    try:
        for _ in range(calls):
            given = tuple([tensor.clone() for tensor in tensors])
            with torch.no_grad():
                outputs = flat(*given)
        state = flat.kept.now()
        homes = flat.kept.homes()
        own = tuple([(value.clone() if value.untyped_storage().data_ptr() in homes else value).detach() for value in outputs])
    finally:
        flat.kept.restore()
    return Ran(outputs=own, given=given, state=state)
