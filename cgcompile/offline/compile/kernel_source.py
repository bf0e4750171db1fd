"""Defines a kernel variant's function from its Python source, for Triton to compile or to interpret."""

from __future__ import annotations

import linecache
from typing import Any

import triton
import triton.language as tl

from .inductor_helpers import triton_helpers

INDUCTOR = ("triton_helpers", "libdevice", "tl_math", "tl_extra")
"""Names that Inductor's kernels use."""


def define(source: str, name: str, where: str) -> Any:
    """Runs a source and returns the object `name` that it defines, or None.  `inspect` finds the source under the file name
    `where`."""
    scope: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "cgcompile_kernel"}
    if any(helper in source for helper in INDUCTOR):
        helpers = triton_helpers()
        scope |= {"triton_helpers": helpers, "libdevice": helpers.libdevice, "tl_math": helpers.math, "tl_extra": tl.extra}
    # without a time stamp (None), linecache keeps the entry although no such file exists
    linecache.cache[where] = (len(source), None, source.splitlines(keepends=True), where)
    exec(compile(source, where, "exec"), scope)
    return scope.get(name)
