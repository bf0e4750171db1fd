"""Imports of torch and Inductor make a million objects that stay: looking for garbage among them takes a fifth of the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """While it lasts, nothing is looked through for cycles that nobody holds any more."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
