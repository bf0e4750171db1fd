"""Hides from the user's code that it is traced.

Libraries compute differently under torch.export.  transformers keeps masks that eager PyTorch omits, which changes the results of
some models.  If a program differs from eager PyTorch, the model is exported again, and these queries return False.

Private interfaces (torch 2.11, 2.13): the flags that `torch.compiler.is_compiling` and `is_exporting` read, and the name
`torch._subclasses.FakeTensor`, which libraries use in isinstance().  For other code than the user's it does not change.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..devices.tracking import has_value
from ..user_code import is_user_file

FLAGS = ("_is_compiling_flag", "_is_exporting_flag")


FLAGS_ALONE, KNOWN, ALL = "flags", "known", "all"
"""Which queries return False: `torch.compiler.is_exporting()` and similar functions; also isinstance() of tensors with known
values; also that of all tensors.  A library that tests a tensor does so to avoid reading its data, so this is the last resort."""


class _Asked(type):
    """Metaclass of a class without instances for the user's code, or with only tensors of unknown value as instances."""

    questions: str

    def __instancecheck__(cls, value: object) -> bool:
        if not isinstance(value, FakeTensor) or not is_user_file(sys._getframe(1).f_code.co_filename):
            return isinstance(value, FakeTensor)
        return cls.questions == KNOWN and not has_value(value)

    def __getattr__(cls, name: str) -> Any:
        return getattr(FakeTensor, name)


@contextmanager
def tracing_hidden(questions: str) -> Iterator[None]:
    """Lets these `questions` of the user's code return False inside this context.  "" changes nothing."""
    if not questions:
        yield
        return
    flags = {name: getattr(torch.compiler, name) for name in FLAGS}
    fake_tensor = torch._subclasses.FakeTensor
    for name in FLAGS:
        setattr(torch.compiler, name, False)
    if questions != FLAGS_ALONE:
        stand_in = _Asked("FakeTensor", (), {"questions": questions})
        setattr(torch._subclasses, "FakeTensor", stand_in)  # noqa: B010  mypy knows it as a class
    try:
        yield
    finally:
        for name, flag in flags.items():
            setattr(torch.compiler, name, flag)
        setattr(torch._subclasses, "FakeTensor", fake_tensor)  # noqa: B010
