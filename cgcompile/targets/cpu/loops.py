"""Patches of the loops that Inductor generates: their threads, exceptions of index checks inside them, and reshapes.

Inductor (torch 2.13) writes plain `omp parallel` if it compiles for all processors, but allocates the partial results of a parallel
reduction for its own number of threads.  On a machine with more threads the code writes past them, and parts of a sum are lost.
torch 2.11 fixes the number.  `cpp.dynamic_threads` reads the number at run time, but makes every loop parallel.  For a few
elements, starting threads takes longer than the loop.  So the option is off while Inductor decides which loops are worth threads.

Generated code throws if an index is out of range.  An exception that leaves an OpenMP loop ends the process ("terminate called
after throwing an instance of 'c10::Error'", seen with torch 2.11 and 2.13).  So the body of a loop that may throw stores the first
exception, and the function rethrows it after its loops.  Loops without checks are unchanged.

Where eager PyTorch copies a tensor that cannot be viewed, Inductor computes the copy inside its reader.  The reshape turns the
reader's indices into indices of the copy.  A reshape across axes, such as (32, 16) of (16, 32), makes each index a quotient and a
remainder of all of them.  Two of them around a slice, as in shifted relative positions, with a symbolic size, give terms of 250
operations.  sympy needs seconds for each (Funnel, torch 2.13: no end after 15 minutes), and the loop would compute one for every
element.  So the operand of such a reshape is stored first, and the reshape is a view of it.

Private in torch (2.11, 2.13): the option, and `decide_parallel_depth` of the classes below; `CppKernel.gen_body` and
`.assert_function`, `KernelGroup.codegen_group`, and `BracesBuffer`; `View.create` and `View.resolve_negative_size`, `StorageBox`,
`Pointwise` of torch._inductor.ir.
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

OPTION = "cpp.dynamic_threads"

DECIDING = ("CppKernel", "OuterLoopFusedKernel")
"""Classes of torch._inductor.codegen.cpp that define `decide_parallel_depth`."""


@contextmanager
def any_number_of_threads() -> Iterator[None]:
    """Makes the code that Inductor generates while active run on any number of threads.  Raises torch-unsupported."""
    with ExitStack() as stack:
        for name in DECIDING:
            owner = getattr(cpp, name, None)
            if owner is None or "decide_parallel_depth" not in vars(owner) or OPTION not in config.get_config_copy():
                raise BuildError(
                    "torch-unsupported",
                    f"torch {torch.__version__}: Inductor has no {name}.decide_parallel_depth, or no option {OPTION}; "
                    "cgcompile was tested with 2.11 and 2.13",
                )
            stack.enter_context(patch.object(owner, "decide_parallel_depth", _unforced(owner.decide_parallel_depth)))
        stack.enter_context(config.patch({OPTION: True}))
        yield


def _unforced(decide: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(decide)
    def decided(*arguments: Any) -> Any:
        with config.patch({OPTION: False}):
            return decide(*arguments)

    return decided


FAILING = (("CppKernel", "gen_body"), ("KernelGroup", "codegen_group"))
"""Methods of torch._inductor.codegen.cpp that generate a loop body, which may throw, and the function around it."""

KEPT = "cgcompile_failure"
"""The variable of a generated function that stores an exception."""

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
def failures_leave_loops() -> Iterator[None]:
    """Makes the code that Inductor generates for the CPU while active throw only outside its loops.  Raises torch-unsupported."""
    for name, method in FAILING:
        if method not in vars(getattr(cpp, name, object)) or not hasattr(cpp, "BracesBuffer"):
            raise BuildError(
                "torch-unsupported",
                f"torch {torch.__version__}: Inductor has no {name}.{method}; cgcompile was tested with 2.11 and 2.13",
            )
    with (
        patch.object(cpp.CppKernel, "gen_body", _keeping(cpp.CppKernel.gen_body)),
        patch.object(cpp.KernelGroup, "codegen_group", _passing_on(cpp.KernelGroup.codegen_group)),
    ):
        yield


def _keeping(plain: Callable[..., Any]) -> Callable[..., Any]:
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
            guarded.writeline(f"{KEPT}.keep();")
        return guarded

    return gen_body


def _passing_on(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def codegen_group(*args: Any, **named: Any) -> Any:
        text = plain(*args, **named)
        return passing_on(text) if KEPT in text else text

    return codegen_group


def passing_on(text: str) -> str:
    """Returns the source of a function whose loops store exceptions, with the variable at its start and the rethrow at its end."""
    begin = text.index('extern "C"')
    body, end = text.index("{", begin) + 1, text.rindex("}")
    return (
        f"{text[:begin]}{DEFINITION}{text[begin:body]}\n    CgcompileFailure {KEPT};"
        f"{text[body:end]}    {KEPT}.pass_on();\n{text[end:]}"
    )


@contextmanager
def stored_before_reshapes() -> Iterator[None]:
    """Makes Inductor store the operand of a reshape across axes while active.  Raises torch-unsupported."""
    view = getattr(ir, "View", None)
    if not {"create", "resolve_negative_size"} <= set(dir(view)) or not hasattr(ir, "StorageBox") or not hasattr(ir, "Pointwise"):
        raise BuildError(
            "torch-unsupported", f"torch {torch.__version__}: Inductor has no View.create; cgcompile was tested with 2.11 and 2.13"
        )
    with patch.object(ir.View, "create", _storing(ir.View.create)):
        yield


def _storing(create: Callable[..., Any]) -> Callable[..., Any]:
    def created(x: Any, new_size: Sequence[Any]) -> Any:
        computed = isinstance(x, ir.StorageBox) and isinstance(x.data, ir.Pointwise)
        if computed and across(*ir.View.resolve_negative_size(x.get_size(), new_size)):
            x.realize()
        return create(x, new_size)

    return created


def across(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Whether a reshape from `old` to `new` sizes, numbers or symbols, goes across axes: some axes are neither merged nor split.
    Then both shapes have axis boundaries between two common boundaries."""
    ends, others = _ends(old), _ends(new)
    common = set(ends) & set(others)
    return any(one and other for one, other in zip(_between(ends, common), _between(others, common), strict=True))


def _ends(sizes: Sequence[Any]) -> list[Any]:
    """Returns the axis boundaries as numbers of elements, from the last axis on, each once."""
    return list(dict.fromkeys(accumulate(reversed(sizes), operator.mul)))


def _between(ends: Sequence[Any], common: set[Any]) -> list[int]:
    """Returns how many boundaries are before, between and after the common ones."""
    counts = [0]
    for end in ends:
        if end in common:
            counts.append(0)
        else:
            counts[-1] += 1
    return counts
