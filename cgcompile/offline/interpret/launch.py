"""Runs one launch: all program instances of a grid, in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...errors import BuildError
from .builder import Builder
from .front_end import Diverged
from .values import Array

ELEMENTS = 1 << 20
"""The maximum number of elements of a batch's widest value.  Larger batches exceed the CPU caches and are no faster."""


def launch(
    builder: Builder,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    grid: tuple[int, int, int],
    kernel: str,
    widest: int = 0,
) -> int:
    """Runs every instance of `grid`.  `kernel`: the kernel's name in messages.  Returns the number of elements of an instance's
    widest value.  Pass it as `widest` to the function's next launch; otherwise the first instance runs alone to find it.  If
    instances of a batch take different branches, the batch is undone and run again in groups.  Raises function-not-interpretable,
    access-outside, kernel-asserted, kernel-unreadable."""
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
        except Diverged as divergence:
            builder.memory.undo()
            waiting.extend(reversed(_groups(batch, divergence.values)))
        except BuildError:
            raise
        except Exception as error:  # Triton's front end may raise any error for a kernel that its compiler refuses too
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            raise BuildError("kernel-unreadable", f"{builder.kernel}: the interpreter failed: {message}") from error


def _ids(numbers: Array) -> Array:
    return numbers.astype(np.int32)


def _groups(batch: Array, values: Array) -> list[Array]:
    """Groups the instances with equal values; the group of the first instance comes first."""
    _, first, group = np.unique(values, return_index=True, return_inverse=True)
    return [batch[group == kind] for kind in np.argsort(first)]
