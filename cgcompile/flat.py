"""The user's model over flat tensors: what is exported, and what eager PyTorch is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cgbundle.schema import Tree

from .obstacles import Run
from .placing import placing
from .source import Sample
from .trees import Leaf, describe, rebuild


def nobody(run: Run) -> None:
    """Nobody watches."""


class Flat(torch.nn.Module):
    """The user's module over flat tensors: a tuple of tensors in, a tuple of tensors out.  After a call, `result`
    and `names` say what it gave.  `watch` is told the Run of each call before it begins; a trace goes as `run`, a call with real
    tensors, did, and takes the reads from it that `known` names (see placing.py)."""

    def __init__(self, model: torch.nn.Module, like: Sample) -> None:
        super().__init__()
        self.model = model
        self.like = like
        self.result: Tree | None = None
        self.names: list[str] = []
        self.run = Run()
        self.known: frozenset[int] = frozenset()
        self.watch: Callable[[Run], None] = nobody

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        trees = dict(self.like.call["call"])
        names = iter(trees)
        args = [rebuild(trees[next(names)], list(tensors), value) for value in self.like.args]
        kwargs = {name: rebuild(trees[name], list(tensors), value) for name, value in self.like.kwargs.items()}
        leaves: list[Leaf] = []
        with placing(tensors, self.run, self.known) as run:
            self.watch(run)
            made = self.model(*args, **kwargs)
        self.result = describe(made, "", leaves)
        self.names = [name or "output" for name, _ in leaves]
        return tuple([tensor for _, tensor in leaves])


def run_eager(flat: Flat, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs of eager PyTorch.  Inputs are copied first: a model may write to them."""
    return run_writing(flat, tensors)[0]


def run_writing(flat: Flat, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The outputs of eager PyTorch, and what copies of the inputs hold after the call.  An output may be one of these."""
    given = tuple([tensor.clone() for tensor in tensors])
    with torch.no_grad():
        outputs: tuple[torch.Tensor, ...] = flat(*given)
    return outputs, given
