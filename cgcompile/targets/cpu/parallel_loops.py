"""Loops that run on as many threads as the machine that serves gives them, not as the one that built had.

Inductor (torch 2.13) writes plain `omp parallel` where it compiles for all processors, and still sizes the partial results of a
parallel reduction for its own number of threads: on a machine with more, memory behind them is overwritten and parts of a sum are
lost.  2.11 fixes the number.  `cpp.dynamic_threads` asks at run time; but with it every loop becomes parallel, also one of a few
elements, for which starting threads takes longer than the loop.  So it is switched off where Inductor decides which loops pay.

Private of torch (2.11, 2.13): the option, and `decide_parallel_depth` of the classes below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import config
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
