"""Puts a model in training mode into eval() during a build or check, because training mode is rarely intended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..model.load import load_sources
from ..model.source import Source
from ..model.user_code import call_user

EVAL_NOTE = "left in training mode, put into eval() (--train keeps it)"


@contextmanager
def evaluated(source: Source, train: bool) -> Iterator[str]:
    """Puts the model into eval() unless `train`, and restores the modes of its modules at the end.

    Yields a note, or "" if no mode changes.  A model from torch.export has no modes.  Raises source-invalid if the model's eval()
    fails."""
    modes = [(module, module.training) for module in source.model.modules()]
    try:
        yield EVAL_NOTE if not train and put_into_eval(source) else ""
    finally:
        for module, mode in modes:
            module.training = mode


def load_evaluated(model: Any, train: bool) -> tuple[Source, ...]:
    """Loads the model again and puts it into eval() unless `train`."""
    sources = load_sources(model)
    if not train:
        put_into_eval(sources[0])
    return sources


def put_into_eval(source: Source) -> bool:
    """Puts a model in training mode into eval().  Returns whether it was in training mode.  Raises source-invalid."""
    if source.saved is not None or not source.model.training:
        return False
    return bool(call_user(_put, "eval()", source.label, source.model))


def _put(model: torch.nn.Module) -> bool:
    try:
        model.eval()
    except NotImplementedError:  # raised by a module from torch.export
        return False
    return True
