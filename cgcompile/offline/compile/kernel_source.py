"""The Python source of a kernel variant -> the function that it defines, for Triton to compile or to interpret.  Private interface
(torch 2.11 to 2.13): `torch._inductor.runtime.triton_helpers`, which the kernels that Inductor writes use."""

from __future__ import annotations

import linecache
from typing import Any

import triton
import triton.language as tl

INDUCTOR = ("triton_helpers", "libdevice", "tl_math", "tl_extra")
"""Names that Inductor's kernels use; importing torch for them takes seconds, so it is not done for a kernel without."""


def define(source: str, name: str, where: str) -> Any:
    """The object `name` that a source defines, None if it does not.  `inspect` finds the source as file `where`, which is none."""
    scope: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "cgcompile_kernel"}
    if any(each in source for each in INDUCTOR):
        from torch._inductor.runtime import triton_helpers  # here: imports torch

        helpers = {"libdevice": triton_helpers.libdevice, "tl_math": triton_helpers.math, "tl_extra": tl.extra}
        scope |= {"triton_helpers": triton_helpers, **helpers}
    # without a time stamp, linecache keeps an entry that is no file
    linecache.cache[where] = (len(source), None, source.splitlines(keepends=True), where)
    exec(compile(source, where, "exec"), scope)
    return scope.get(name)
