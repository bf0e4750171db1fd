"""Patches Inductor's C++ loops in three ways: number of threads, exceptions of index checks, and reshapes.

Threads: if all processors are used, Inductor (torch 2.13) writes `omp parallel` without a number of threads.  But it allocates the
partial results of a parallel reduction for the number of threads of the build.  On a machine with more threads the code writes
past their end, and parts of a sum are lost.  torch 2.11 writes a fixed number of threads.  With the option
`cpp.dynamic_threads`, the code reads the number at run time, but then Inductor makes every loop parallel.  For a few elements,
starting threads takes longer than the loop.  So the option is off while Inductor decides which loops to make parallel.

Exceptions: generated code throws if an index is out of range.  An exception that leaves an OpenMP loop ends the process
("terminate called after throwing an instance of 'c10::Error'", seen with torch 2.11 and 2.13).  So the patch adds a try block
to a loop body that may throw.  It stores the first exception, and the function rethrows it after its loops.  Loops without
checks are unchanged.

Reshapes: eager PyTorch copies a tensor that cannot be viewed in the new shape.  Inductor instead fuses the copy into the
operation that reads it, and converts the indices.  For a reshape across axes, such as (16, 32) to (32, 16), every new index is
a quotient or a remainder of all old ones.  Attention with shifted relative positions has two such reshapes around a slice.  With a
symbolic size, their index expressions have 250 operations.  sympy needs seconds for each (Funnel, torch 2.13: not finished after 15
minutes), and the loop would compute one for every element.  So the patch materializes the operand of such a reshape.  The
reshape is then a view of it.

Private interfaces (torch 2.11, 2.13): the option `cpp.dynamic_threads`; `decide_parallel_depth` of DEPTH_CLASSES;
`CppKernel.gen_body` and `.assert_function`, `KernelGroup.codegen_group`, and `BracesBuffer`; `View.create` and
`View.resolve_negative_size`, `StorageBox`, `Pointwise` of torch._inductor.ir.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import config, ir
from torch._inductor.codegen import cpp

from ...errors import BuildError

THREADS_OPTION = "cpp.dynamic_threads"

DEPTH_CLASSES = ("CppKernel", "OuterLoopFusedKernel")
"""Classes of torch._inductor.codegen.cpp that define `decide_parallel_depth`."""


@contextmanager
def threads_read_at_run_time() -> Iterator[None]:
    """While active, makes Inductor generate code that runs correctly on any number of threads.  Raises torch-unsupported."""
    with ExitStack() as stack:
        for name in DEPTH_CLASSES:
            owner = getattr(cpp, name, None)
            if owner is None or "decide_parallel_depth" not in vars(owner) or THREADS_OPTION not in config.get_config_copy():
                raise BuildError(
                    "torch-unsupported",
                    f"torch {torch.__version__}: Inductor has no {name}.decide_parallel_depth, or no option {THREADS_OPTION}; "
                    "cgcompile was tested with 2.11 and 2.13",
                )
            stack.enter_context(patch.object(owner, "decide_parallel_depth", _without_option(owner.decide_parallel_depth)))
        stack.enter_context(config.patch({THREADS_OPTION: True}))
        yield


def _without_option(decide: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(decide)
    def decide_parallel_depth(*arguments: Any) -> Any:
        with config.patch({THREADS_OPTION: False}):
            return decide(*arguments)

    return decide_parallel_depth


PATCHED_METHODS = (("CppKernel", "gen_body"), ("KernelGroup", "codegen_group"))
"""Methods of torch._inductor.codegen.cpp: the first generates a loop body, the second the function that contains the loops."""

FAILURE = "cgcompile_failure"
"""The name of the C++ variable that stores the first exception of a function's loops."""

DEFINITION = """\
#ifndef CGCOMPILE_FAILURE
#define CGCOMPILE_FAILURE
#include <exception>
#include <mutex>
struct CgcompileFailure {
  std::mutex mutex;
  std::exception_ptr first;
  void keep() {
    std::lock_guard<std::mutex> locked(mutex);
    if (!first) first = std::current_exception();
  }
  void pass_on() {
    if (first) std::rethrow_exception(first);
  }
};
#endif
"""


@contextmanager
def exceptions_after_loops() -> Iterator[None]:
    """While active, makes Inductor generate CPU code that throws after its loops, not inside them.  Raises torch-unsupported."""
    for name, method in PATCHED_METHODS:
        if method not in vars(getattr(cpp, name, object)) or not hasattr(cpp, "BracesBuffer"):
            raise BuildError(
                "torch-unsupported",
                f"torch {torch.__version__}: Inductor has no {name}.{method}; cgcompile was tested with 2.11 and 2.13",
            )
    with (
        patch.object(cpp.CppKernel, "gen_body", _catching(cpp.CppKernel.gen_body)),
        patch.object(cpp.KernelGroup, "codegen_group", _rethrowing(cpp.KernelGroup.codegen_group)),
    ):
        yield


def _catching(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def gen_body(kernel: Any, *args: Any) -> Any:
        body = plain(kernel, *args)
        text = body.getvalue()
        if kernel.assert_function not in text and "throw " not in text:
            return body
        guarded = cpp.BracesBuffer()
        guarded.writeline("try")
        with guarded.indent():
            guarded.splice(body)
        guarded.writeline("catch (...)")
        with guarded.indent():
            guarded.writeline(f"{FAILURE}.keep();")
        return guarded

    return gen_body


def _rethrowing(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def codegen_group(*args: Any, **named: Any) -> Any:
        text = plain(*args, **named)
        return with_rethrow(text) if FAILURE in text else text

    return codegen_group


def with_rethrow(text: str) -> str:
    """Returns the source of a C++ function with the variable for the exception at its beginning, and the rethrow at its end."""
    begin = text.index('extern "C"')
    body, end = text.index("{", begin) + 1, text.rindex("}")
    return (
        f"{text[:begin]}{DEFINITION}{text[begin:body]}\n    CgcompileFailure {FAILURE};"
        f"{text[body:end]}    {FAILURE}.pass_on();\n{text[end:]}"
    )


@contextmanager
def materialized_before_reshapes() -> Iterator[None]:
    """While active, makes Inductor materialize the operand of a reshape across axes.  Raises torch-unsupported."""
    view = getattr(ir, "View", None)
    if not {"create", "resolve_negative_size"} <= set(dir(view)) or not hasattr(ir, "StorageBox") or not hasattr(ir, "Pointwise"):
        raise BuildError(
            "torch-unsupported", f"torch {torch.__version__}: Inductor has no View.create; cgcompile was tested with 2.11 and 2.13"
        )
    with patch.object(ir.View, "create", _materializing(ir.View.create)):
        yield


def _materializing(create: Callable[..., Any]) -> Callable[..., Any]:
    def create_view(x: Any, new_size: Sequence[Any]) -> Any:
        computed = isinstance(x, ir.StorageBox) and isinstance(x.data, ir.Pointwise)
        if computed and crosses_axes(*ir.View.resolve_negative_size(x.get_size(), new_size)):
            x.realize()
        return create(x, new_size)

    return create_view


def crosses_axes(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Whether a reshape from `old` to `new` sizes (numbers or symbols) does more than merge or split axes.  Then, between two
    boundaries that both shapes have, each shape has further boundaries."""
    old_ends, new_ends = _boundaries(old), _boundaries(new)
    common = set(old_ends) & set(new_ends)
    counts = zip(_counts_between(old_ends, common), _counts_between(new_ends, common), strict=True)
    return any(old_count and new_count for old_count, new_count in counts)


def _boundaries(sizes: Sequence[Any]) -> list[Any]:
    """Returns the distinct axis boundaries, from the last axis on.  A boundary is the number of elements in the axes after it."""
    return list(dict.fromkeys(accumulate(reversed(sizes), operator.mul)))


def _counts_between(ends: Sequence[Any], common: set[Any]) -> list[int]:
    """Returns the number of boundaries before the first common boundary, between each two of them, and after the last."""
    counts = [0]
    for end in ends:
        if end in common:
            counts.append(0)
        else:
            counts[-1] += 1
    return counts
