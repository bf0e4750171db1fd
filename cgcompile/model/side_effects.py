"""The effects of a call of the model that are not operations in the graph, and the values that Python reads from tensors."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

BRANCH = "Python needs the value of a tensor to continue"
ASSERTED = "Python goes on only where this has the value that it has for the example inputs; the bundle asserts it"
"""The message of the obstacle asserted-value."""

BRANCH_FIX = (
    "choose values with torch.where, rows with a mask (x[mask]) and code with torch.cond; loop with torch.while_loop; "
    "create constant tensors inside forward()"
)
LOOP_FIX = "loop over all there is (every expert), with a weight of 0 for what is not chosen"
WHILE_FIX = (
    "loop over range(N) with a break or torch.where, or with torch.while_loop; suppress boxes with torchvision.ops.nms; "
    "let a solver take fixed steps (method='rk4')"
)
FLAG = re.compile(r"(el)?if (not )?self\.\w+(\.\w+\(\))?:")
"""A source line that tests only an attribute of the model.  If no call writes to it, Python gets its known value."""

FLAG_FIX = "a call changes this attribute: if only the first call does, call the model once at the end of model()"
SIZED = "a number that is read out of a tensor is a size, or a position, in another one"
SIZE_FIX = (
    "give the number as an argument (batch_size=, dim_size=, size= of graph libraries), take it from the size of an input, or make "
    "the tensor in forward(), as torch.zeros(n, dtype=torch.int64) for the batch of one graph: int() of a tensor is no size; a "
    "position is a tensor of shape [1], as in cache.index_copy_(0, position, row)"
)


def branch_fix(line: str, message: str = BRANCH) -> str:
    """Returns the hint for a source line where Python needs the value of a tensor.  `message` says why it does."""
    if message.startswith(SIZED):
        return SIZE_FIX
    if line.startswith("while "):
        return WHILE_FIX
    if FLAG.match(line):
        return FLAG_FIX
    return LOOP_FIX if line.startswith("for ") and " in range(" not in line else BRANCH_FIX


@dataclass(frozen=True, kw_only=True, slots=True)
class Obstacle:
    """An effect that is not an operation: the rule of the finding, its message, the user's file:line and the source line."""

    rule: str
    message: str
    where: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Asserted:
    """Values with which Python must continue, because any other value fails.  `answers` has positions of branches in
    `SideEffects.answers`, `reads` has positions of numbers in `SideEffects.reads`."""

    answers: frozenset[int] = frozenset()
    reads: frozenset[int] = frozenset()


NOTHING = Asserted()

ASSIGNED, UNREAD = "assigned-attribute", "unread-attribute"
"""Rules of attributes that calls change.  ASSIGNED: each call assigns it before it reads it.  UNREAD: no result depends on it."""

UNFINISHED = object()
"""A read that raised an exception."""


class SideEffects:
    """The effects of one call.

    `answers` has the truth values of branches on data, in order, and `reads` the numbers that Python read from tensors.  `guessed`
    are positions of answers about a single tensor without data.  `whole` are positions of reads of a single integer.  `early` has
    the attributes that the call read before it assigned them.  `baked` has the parameters and buffers whose values a traced call
    returned to Python, by name, with the (file:line, source line) of the first read.  `written` has those that the call wrote to,
    or replaced.

    The call fills this object.  No other record of a traced call remains: torch.export restores the attributes of the module.  The
    tensors of a traced call hold no data, so its `reads` contain symbols.
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
        """Returns the positions of reads that created any of these symbols, and of a read that raised an exception."""
        return frozenset([index for index, read in enumerate(self.reads) if read is UNFINISHED or _symbols(read) & symbols])


def _symbols(value: Any) -> set[Any]:
    symbols: set[Any] = set()
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            symbols |= leaf.node.expr.free_symbols
    return symbols
