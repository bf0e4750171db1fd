"""Limits Python's garbage collection during builds.  Importing torch and Inductor creates a million objects that stay alive.
Scanning them takes 20% of the import time, and 10% of Inductor's lowering afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 100_000, 20, 20
"""Arguments of `gc.set_threshold`.  A build of a language model with eight layers spent 2 of 70 s in collections, instead of 6."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disables collections during the block, and then freezes all objects (`gc.freeze`) until `gc.unfreeze`.  Otherwise later
    collections would each take 0.25 s to scan them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Sets the thresholds SELDOM during a build.  At the end it unfreezes the objects that `quick_imports` froze, unless the
    process had frozen objects before."""
    frozen, threshold = gc.get_freeze_count(), gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        if not frozen:
            gc.unfreeze()


def collect_seldom() -> None:
    """For a process that only compiles: freezes all objects and sets the thresholds SELDOM.  Unreachable cycles stay in memory
    longer."""
    gc.freeze()
    gc.set_threshold(*SELDOM)
