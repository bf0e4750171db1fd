"""Finds the line of the model that makes a dynamic size constant.  torch.export's error has the size, and no line.

Private interface (torch 2.11, 2.13): `ShapeEnv._set_replacement`.  Without it, errors name no line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import sympy  # type: ignore[import-untyped]
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ...model.user_code import here

REPLACE = "_set_replacement"


@contextmanager
def fixing_lines() -> Iterator[dict[int, tuple[str, str]]]:
    """Yields a dict that gets (file:line, source line) for every constant that replaces a dynamic size inside the context."""
    lines: dict[int, tuple[str, str]] = {}
    plain = getattr(ShapeEnv, REPLACE, None)

    def noted(self: Any, symbol: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, sympy.Integer):
            lines.setdefault(int(value), here())
        return plain(self, symbol, value, *args, **kwargs)  # type: ignore[misc]

    if plain is None:
        yield lines
        return
    with patch.object(ShapeEnv, REPLACE, noted):
        yield lines
