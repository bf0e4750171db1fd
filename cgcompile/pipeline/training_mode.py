"""Models in training mode: rarely meant, so that builds and checks put them into eval() as long as they last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..model.source import Source
from ..model.user_code import call_user

SAID = "left in training mode, put into eval() (--train keeps it)"


@contextmanager
def evaluated(source: Source, train: bool) -> Iterator[str]:
    """While it lasts the model is in eval(), unless `train`; then its modules have the modes that they had.

    Gives what to say of it, "" where nothing changes: for a model that is in eval() as a whole, whatever its parts are in, and for
    one that torch.export made, which has no modes.  Raises source-invalid where the model's own eval() fails."""
    model = source.model
    if train or source.saved or not model.training:
        yield ""
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield SAID if call_user(_put_into_eval, "eval()", source.label, model) else ""
    finally:
        for module, mode in modes:
            module.training = mode


def _put_into_eval(model: object) -> bool:
    try:
        model.eval()  # type: ignore[attr-defined]
    except NotImplementedError:  # of torch.export's modules
        return False
    return True
