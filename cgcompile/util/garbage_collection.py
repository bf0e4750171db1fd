"""When Python looks for garbage.  Imports of torch and Inductor make a million objects that stay: looking among them takes a fifth
of the time, and a tenth of what Inductor lowers afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 100_000, 20, 20
"""Thresholds of `gc.set_threshold`.  With Python's own, a language model of eight layers spent 6 of 70 s on it, with these 2."""


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
def seldom_collected() -> Iterator[None]:
    """For the time of a build, as `collect_seldom` for what it makes.  At its end, what `quick_imports` left out is looked through
    again, unless the process had such objects before."""
    frozen, threshold = gc.get_freeze_count(), gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        if not frozen:
            gc.unfreeze()


def collect_seldom() -> None:
    """For a process that does nothing but compile: what is there now is never looked through again, and what it makes once in
    100,000 objects.  Cycles stay in memory that much longer."""
    gc.freeze()
    gc.set_threshold(*SELDOM)
