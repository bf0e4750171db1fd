"""The loops that Inductor writes: the threads they run on, checks of indices that fail inside of them, and reshapes in them.

Inductor (torch 2.13) writes plain `omp parallel` where it compiles for all processors, and still sizes the partial results of a
parallel reduction for its own number of threads: on a machine with more, memory behind them is overwritten and parts of a sum are
lost.  2.11 fixes the number.  `cpp.dynamic_threads` asks at run time; but with it every loop becomes parallel, also one of a few
elements, for which starting threads takes longer than the loop.  So it is switched off where Inductor decides which loops pay.

Generated code throws where an index is out of range.  An exception that leaves a loop of OpenMP ends the process, whatever is
done to catch it outside ("terminate called after throwing an instance of 'c10::Error'", seen with torch 2.11 and 2.13).  So the
body of a loop that may throw keeps the first exception, and the function throws it when its loops are done.  Loops without checks
stay as they are.

Where eager PyTorch copies what cannot be viewed, Inductor computes the copy inside of what reads it, at indices that the reshape
makes of the reader's.  A reshape that neither merges nor splits axes, as (32, 16) of (16, 32), makes each index a quotient and
a remainder of all of them; two of them around a slice, as in relative positions that are shifted, and a size that is a symbol,
make terms of 250 operations.  sympy needs seconds for each (Funnel, torch 2.13: no end after 15 minutes), and the loop would
compute one for every element.  So what such a reshape takes is stored first, and the reshape is a view of it.

Private of torch (2.11, 2.13): the option, and `decide_parallel_depth` of the classes below; `CppKernel.gen_body` and
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
"""Classes of torch._inductor.codegen.cpp that have a `decide_parallel_depth` of their own."""


@contextmanager
def any_number_of_threads() -> Iterator[None]:
    """While it lasts, what Inductor generates runs on any number of threads.  Raises torch-unsupported."""
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
"""Methods of torch._inductor.codegen.cpp that write what may throw, and the function around it."""

KEPT = "cgcompile_failure"
"""The variable of a function that keeps an exception."""

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
    """While it lasts, what Inductor generates for the CPU throws outside of its loops alone.  Raises torch-unsupported."""
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
        kept = cpp.BracesBuffer()
        kept.writeline("try")
        with kept.indent():
            kept.splice(body)
        kept.writeline("catch (...)")
        with kept.indent():
            kept.writeline(f"{KEPT}.keep();")
        return kept

    return gen_body


def _passing_on(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def codegen_group(*args: Any, **named: Any) -> Any:
        text = plain(*args, **named)
        return passing_on(text) if KEPT in text else text

    return codegen_group


def passing_on(text: str) -> str:
    """The source of one function whose loops keep exceptions, with the variable at its beginning and the throw at its end."""
    begin = text.index('extern "C"')
    body, end = text.index("{", begin) + 1, text.rindex("}")
    return (
        f"{text[:begin]}{DEFINITION}{text[begin:body]}\n    CgcompileFailure {KEPT};"
        f"{text[body:end]}    {KEPT}.pass_on();\n{text[end:]}"
    )


@contextmanager
def stored_before_reshapes() -> Iterator[None]:
    """While it lasts, Inductor stores what is reshaped across axes.  Raises torch-unsupported."""
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
    """Whether a reshape from `old` to `new` sizes, numbers or symbols, neither merges nor splits some of the axes: between two
    places where axes of both end, both have axes that end elsewhere."""
    ends, others = _ends(old), _ends(new)
    common = set(ends) & set(others)
    return any(one and other for one, other in zip(_between(ends, common), _between(others, common), strict=True))


def _ends(sizes: Sequence[Any]) -> list[Any]:
    """After how many elements each axis ends, the last one first, each once."""
    return list(dict.fromkeys(accumulate(reversed(sizes), operator.mul)))


def _between(ends: Sequence[Any], common: set[Any]) -> list[int]:
    """How many are before, between and behind the common ones."""
    counts = [0]
    for end in ends:
        if end in common:
            counts.append(0)
        else:
            counts[-1] += 1
    return counts
