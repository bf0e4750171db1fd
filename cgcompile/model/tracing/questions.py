"""What the user's code is told when it asks whether it is traced.

Libraries compute otherwise under torch.export: transformers keeps masks that eager PyTorch leaves out, and some of its models give
other values by that.  Where a program differs from eager PyTorch, the model is exported again and told "no".

Private interfaces (torch 2.11, 2.13): the flags that `torch.compiler.is_compiling` and `is_exporting` read, and the name
`torch._subclasses.FakeTensor`, which libraries compare classes with; for code that is not the user's it stays what it is.
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
"""Which questions are answered with "no": `torch.compiler.is_exporting()` and its like; also what a tensor of known value is an
instance of; what any tensor is.  A library that asks of a tensor means to leave its data alone: that answer is the last to be
changed."""


class _Asked(type):
    """Of a class that no tensor is an instance of where the user asks, or none of a known value."""

    questions: str

    def __instancecheck__(cls, value: object) -> bool:
        if not isinstance(value, FakeTensor) or not is_user_file(sys._getframe(1).f_code.co_filename):
            return isinstance(value, FakeTensor)
        return cls.questions == KNOWN and not has_value(value)

    def __getattr__(cls, name: str) -> Any:
        return getattr(FakeTensor, name)


@contextmanager
def tracing_hidden(questions: str) -> Iterator[None]:
    """Meanwhile the user's code is told that nothing is traced, as far as it asks one of these `questions`; "" are none."""
    if not questions:
        yield
        return
    flags = {name: getattr(torch.compiler, name) for name in FLAGS}
    known = torch._subclasses.FakeTensor
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
        setattr(torch._subclasses, "FakeTensor", known)  # noqa: B010
