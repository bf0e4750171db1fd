"""Finds the lines of the model that make a dynamic size constant.  torch.export's error has the size, and no line.

Private interface (torch 2.11, 2.13): `ShapeEnv._set_replacement`.  Without it, errors name no line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import sympy  # type: ignore[import-untyped]
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ...model.user_code import here

REPLACE = "_set_replacement"


Lines = Mapping[int, set[tuple[str, str]]]
"""(file:line, source line) of the code that replaces a dynamic size with a constant, by the constant."""


@contextmanager
def constant_size_lines() -> Iterator[Lines]:
    """Collects these lines while the context is active."""
    lines = defaultdict[int, set[tuple[str, str]]](set)
    plain = getattr(ShapeEnv, REPLACE, None)

    def noted(self: Any, symbol: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, sympy.Integer):
            lines[int(value)].add(here())
        return plain(self, symbol, value, *args, **kwargs)  # type: ignore[misc]

    if plain is None:
        yield lines
        return
    with patch.object(ShapeEnv, REPLACE, noted):
        yield lines
