"""Settings while a case is judged: deterministic algorithms as the case requires, no gradients, and quiet loggers of torch."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import torch

LOUD = ("torch.fx.experimental.symbolic_shapes", "torch.fx._symbolic_trace", "torch._inductor", "torch._export", "torch.export")
"""Loggers that warn about cases of the corpus."""


@contextmanager
def settings(deterministic: bool) -> Iterator[None]:
    """Applies the settings and restores the old ones. Drops stderr, to which torch.export prints graphs that it cannot finish."""
    was = torch.are_deterministic_algorithms_enabled()
    levels = {name: logging.getLogger(name).level for name in LOUD}
    torch.use_deterministic_algorithms(deterministic)
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(was)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
