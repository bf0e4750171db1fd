"""Hides from the user's code that it is traced.

Libraries compute differently while torch.export traces them.  transformers keeps masks that it omits in eager PyTorch, which
changes the results of some models.  If a program differs from eager PyTorch, the model is exported again, and these queries return
False.

Private interfaces (torch 2.11, 2.13): the flags that `torch.compiler.is_compiling` and `is_exporting` read, and the name
`torch._subclasses.FakeTensor`, which libraries use in isinstance().  Code that is not the user's gets the original answer.
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
"""The queries that return False.  FLAGS_ALONE: `torch.compiler.is_exporting()` and similar functions.  KNOWN: also isinstance() of
tensors with known values.  ALL: also that of all tensors, as the last resort: a library tests a tensor to avoid reading its
data."""


class _HiddenFakeTensor(type):
    """Metaclass of the class that replaces FakeTensor.  For the user's code it has no instances, or only tensors of unknown
    value."""

    questions: str

    def __instancecheck__(cls, value: object) -> bool:
        if not isinstance(value, FakeTensor) or not is_user_file(sys._getframe(1).f_code.co_filename):
            return isinstance(value, FakeTensor)
        return cls.questions == KNOWN and not has_value(value)

    def __getattr__(cls, name: str) -> Any:
        return getattr(FakeTensor, name)


@contextmanager
def tracing_hidden(questions: str) -> Iterator[None]:
    """Makes these `questions` (FLAGS_ALONE, KNOWN or ALL; "" for none) return False inside this context."""
    if not questions:
        yield
        return
    flags = {name: getattr(torch.compiler, name) for name in FLAGS}
    fake_tensor = torch._subclasses.FakeTensor
    for name in FLAGS:
        setattr(torch.compiler, name, False)
    if questions != FLAGS_ALONE:
        replacement = _HiddenFakeTensor("FakeTensor", (), {"questions": questions})
        setattr(torch._subclasses, "FakeTensor", replacement)  # noqa: B010  mypy knows it as a class
    try:
        yield
    finally:
        for name, flag in flags.items():
            setattr(torch.compiler, name, flag)
        setattr(torch._subclasses, "FakeTensor", fake_tensor)  # noqa: B010
