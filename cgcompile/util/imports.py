"""Imports of torch and Inductor make a million objects that stay: looking for garbage among them takes a fifth of the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """While it lasts, nothing is looked through for cycles that nobody holds any more.  What is there when it ends is not looked
    through until `gc.unfreeze`: else the next collection would take a quarter of a second for it, and others after that."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.freeze()
            gc.enable()


@contextmanager
def unfrozen() -> Iterator[None]:
    """At its end, what `quick_imports` left out is looked through again, unless the process had such objects before."""
    frozen = gc.get_freeze_count()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
