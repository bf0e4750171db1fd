"""What a call of the model does that leaves no operation in the graph, and what Python learns from tensors on the way."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

BRANCH = "Python needs the value of a tensor to know how to go on"
ASSERTED = "Python goes on only where this has the value that it has for the example inputs; the bundle asserts it"
"""The obstacle of asserted-value, in words."""

BRANCH_FIX = "choose with torch.where or torch.cond, loop with torch.while_loop; make what never changes in forward()"
LOOP_FIX = "loop over all there is (every expert), with a weight of 0 for what is not chosen"
WHILE_FIX = (
    "loop over range(N) with a break or torch.where, or with torch.while_loop; suppress boxes with torchvision.ops.nms; "
    "let a solver take fixed steps (method='rk4')"
)
FLAG = re.compile(r"(el)?if (not )?self\.\w+(\.\w+\(\))?:")
"""A line that asks a tensor of the model alone.  Python knows what no call writes to."""

FLAG_FIX = "calls change this: where the first call sets the model up, call it once before the build, at the end of model()"
SIZED = "a number that is read out of a tensor is a size, or a position, in another one"
SIZE_FIX = (
    "give the number as an argument (batch_size=, dim_size=, size= of graph libraries), take it from the size of an input, or make "
    "the tensor in forward(), as torch.zeros(n, dtype=torch.int64) for the batch of one graph: int() of a tensor is no size"
)


def branch_fix(line: str, message: str = BRANCH) -> str:
    """What to do about a line where Python needs the value of a tensor; `message` says what for."""
    if message.startswith(SIZED):
        return SIZE_FIX
    if line.startswith("while "):
        return WHILE_FIX
    if FLAG.match(line):
        return FLAG_FIX
    return LOOP_FIX if line.startswith("for ") and " in range(" not in line else BRANCH_FIX


@dataclass(frozen=True, kw_only=True, slots=True)
class Obstacle:
    """What leaves no operation in the graph: the rule of the finding, its message, the user's file:line and the source line."""

    rule: str
    message: str
    where: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Asserted:
    """Branches, by their positions among `SideEffects.answers`, and numbers, by theirs among `reads`, where Python goes on one way
    alone: any other fails."""

    answers: frozenset[int] = frozenset()
    reads: frozenset[int] = frozenset()


NOTHING = Asserted()

ASSIGNED, UNREAD = "assigned-attribute", "unread-attribute"
"""The rules of attributes that calls change: assigned before it is read, and of which no result depends on it."""

UNFINISHED = object()
"""A read that raised."""


class SideEffects:
    """The obstacles of one call, what its branches on data said, the numbers that Python read out of tensors, in order, and the
    attributes that it read before it assigned them.  `guessed` are the positions of answers about one
    tensor without data, `whole` of reads of one integer.  `baked` are parameters and buffers whose values a traced call gave to
    Python, by name, with the (file:line, source line) that asked first, and `written` those that the call wrote to, or replaced.

    It is filled during the call and read after it: torch.export puts the attributes of a traced module back, so that nothing else
    survives.  A traced call, whose tensors hold no data, has symbols among its `reads`.
    """

    def __init__(self) -> None:
        self.obstacles: list[Obstacle] = []
        self.answers: list[bool] = []
        self.guessed: set[int] = set()
        self.whole: set[int] = set()
        self.reads: list[Any] = []
        self.early: set[str] = set()
        self.baked: dict[str, tuple[str, str]] = {}
        self.written: set[str] = set()

    def reads_of(self, symbols: Set[Any]) -> frozenset[int]:
        """The positions of the reads that made some of these symbols of export, and of one that failed."""
        return frozenset([index for index, read in enumerate(self.reads) if read is UNFINISHED or _symbols(read) & symbols])


def _symbols(value: Any) -> set[Any]:
    """The symbols of export in a number, or in the numbers of a list."""
    symbols: set[Any] = set()
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            symbols |= leaf.node.expr.free_symbols
    return symbols
