"""Values that are computed before they are reshaped across axes.

Where eager PyTorch copies what cannot be viewed, Inductor computes the copy inside of what reads it, at indices that the reshape
makes of the reader's.  A reshape that neither merges nor splits axes, as (32, 16) of (16, 32), makes each index a quotient and
a remainder of all of them; two of them around a slice, as in relative positions that are shifted, and a size that is a symbol,
make terms of 250 operations.  sympy needs seconds for each (Funnel, torch 2.13: no end after 15 minutes), and the loop would
compute one for every element.  So what such a reshape takes is stored first, and the reshape is a view of it.

Private of torch (2.11, 2.13): `View.create` and `View.resolve_negative_size`, `StorageBox`, `Pointwise` of torch._inductor.ir.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import ir

from ...errors import BuildError


@contextmanager
def stored_before_reshapes() -> Iterator[None]:
    """While it lasts, Inductor stores what is reshaped across axes.  Raises torch-unsupported."""
    view = getattr(ir, "View", None)
    if not {"create", "resolve_negative_size"} <= set(dir(view)) or not hasattr(ir, "StorageBox") or not hasattr(ir, "Pointwise"):
        raise BuildError(
            "torch-unsupported", f"torch {torch.__version__}: Inductor has no View.create; cgcompile was tested with 2.11 and 2.13"
        )
    with patch.object(ir.View, "create", _storing(ir.View.create)):
        yield


def _storing(create: Callable[..., Any]) -> Callable[..., Any]:
    def created(x: Any, new_size: Sequence[Any]) -> Any:
        computed = isinstance(x, ir.StorageBox) and isinstance(x.data, ir.Pointwise)
        if computed and across(*ir.View.resolve_negative_size(x.get_size(), new_size)):
            x.realize()
        return create(x, new_size)

    return created


def across(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Whether a reshape from `old` to `new` sizes, numbers or symbols, neither merges nor splits some of the axes: between two
    places where axes of both end, both have axes that end elsewhere."""
    ends, others = _ends(old), _ends(new)
    common = set(ends) & set(others)
    return any(one and other for one, other in zip(_between(ends, common), _between(others, common), strict=True))


def _ends(sizes: Sequence[Any]) -> list[Any]:
    """After how many elements each axis ends, the last one first, each once."""
    return list(dict.fromkeys(accumulate(reversed(sizes), operator.mul)))


def _between(ends: Sequence[Any], common: set[Any]) -> list[int]:
    """How many are before, between and behind the common ones."""
    counts = [0]
    for end in ends:
        if end in common:
            counts.append(0)
        else:
            counts[-1] += 1
    return counts
