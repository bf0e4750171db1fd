"""One launch: all program instances of a grid, many at a time in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...errors import BuildError
from .builder import Builder
from .front_end import Diverged
from .values import Array

ELEMENTS = 1 << 20
"""Elements of a batch's widest value, at most: beyond the caches, larger batches are no faster."""


def launch(
    builder: Builder,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    grid: tuple[int, int, int],
    kernel: str,
    widest: int = 0,
) -> int:
    """Run every instance of `grid`; `kernel` names it in messages.  Returns how many elements the widest value of an instance has,
    which the next launch of the function is told as `widest`: else the first instance runs alone and shows it.  A batch whose
    instances take different branches is undone and run again in groups.  Raises function-not-interpretable, access-outside,
    kernel-asserted, kernel-unreadable."""
    builder.kernel = builder.memory.where = kernel
    builder.grid = grid
    builder.widest = max(1, widest)
    total, start = grid[0] * grid[1] * grid[2], 0
    if total and not widest:
        _run(builder, function, arguments, np.arange(1))
        start = 1
    size = max(1, ELEMENTS // builder.widest)
    for first in range(start, total, size):
        _run(builder, function, arguments, np.arange(first, min(total, first + size)))
    return builder.widest


def _run(builder: Builder, function: Callable[..., Any], arguments: Mapping[str, Any], batch: Array) -> None:
    waiting = [batch] if len(batch) else []
    x, y, _ = builder.grid
    while waiting:
        batch = waiting.pop()
        builder.instances = (_ids(batch % x), _ids(batch // x % y), _ids(batch // (x * y)))
        builder.memory.journal = [] if len(batch) > 1 else None
        builder.iterations = 0
        try:
            with np.errstate(all="ignore"):
                function(**arguments)
        except Diverged as apart:
            builder.memory.undo()
            waiting.extend(reversed(_groups(batch, apart.values)))
        except BuildError:
            raise
        except Exception as error:  # whatever Triton's front end raises on a kernel that its compiler would refuse too
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise BuildError("kernel-unreadable", f"{builder.kernel}: the interpreter failed: {what}") from error


def _ids(numbers: Array) -> Array:
    return numbers.astype(np.int32)


def _groups(batch: Array, values: Array) -> list[Array]:
    """The instances that agree, those with the first instance first."""
    _, first, group = np.unique(values, return_index=True, return_inverse=True)
    return [batch[group == kind] for kind in np.argsort(first)]
