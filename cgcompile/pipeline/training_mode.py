"""Models in training mode: rarely meant, so that builds and checks put them into eval() as long as they last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..model.load import load_sources
from ..model.source import Source
from ..model.user_code import call_user

SAID = "left in training mode, put into eval() (--train keeps it)"


@contextmanager
def evaluated(source: Source, train: bool) -> Iterator[str]:
    """While it lasts the model is in eval(), unless `train`; then its modules have the modes that they had.

    Gives what to say of it, "" where nothing changes: for a model that is in eval() as a whole, whatever its parts are in, and for
    one that torch.export made, which has no modes.  Raises source-invalid where the model's own eval() fails."""
    modes = [(module, module.training) for module in source.model.modules()]
    try:
        yield SAID if not train and put_into_eval(source) else ""
    finally:
        for module, mode in modes:
            module.training = mode


def load_evaluated(model: Any, train: bool) -> tuple[Source, ...]:
    """The sources of a model that is made once more, in eval() unless `train`."""
    sources = load_sources(model)
    if not train:
        put_into_eval(sources[0])
    return sources


def put_into_eval(source: Source) -> bool:
    """Puts a model that is in training mode into eval(); whether it was one.  Raises source-invalid."""
    if source.saved is not None or not source.model.training:
        return False
    return bool(call_user(_put, "eval()", source.label, source.model))


def _put(model: torch.nn.Module) -> bool:
    try:
        model.eval()
    except NotImplementedError:  # of a module that torch.export made
        return False
    return True
