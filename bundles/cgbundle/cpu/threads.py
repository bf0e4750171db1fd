"""How many threads a run of code for the CPU uses: of OpenMP, which compiled code and torch run on, and of MKL, torch's products.

Both numbers are the calling thread's own (OpenMP 5.2, nthreads-var; MKL_Set_Num_Threads_Local), so that each run sets and restores
them, and programs with different numbers share a process.  torch would overwrite OpenMP's at its first use in a thread: it is asked
for its number before.  Private of torch (2.11, 2.13): the C++ symbol of `at::get_num_threads()`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ..errors import MachineError

MOST = 1024
"""Beyond that a process may fail to start them, which OpenMP ends it for."""

_FIRST_USE = "_ZN2at15get_num_threadsEv"


def check_number(threads: object) -> None:
    """Raises ValueError unless it is a number of threads, from 1 to `MOST`."""
    if not (type(threads) is int and 1 <= threads <= MOST):
        raise ValueError(f"threads={threads!r}: expected an integer from 1 to {MOST}, or None")


def with_threads(run: Callable[..., int], library: ctypes.CDLL, threads: int) -> Callable[..., int]:
    """`run` with that many threads; `library` is torch's, and leads to those under it.  Raises library-refused."""
    try:
        first_use, get_openmp, set_openmp = library[_FIRST_USE], library["omp_get_max_threads"], library["omp_set_num_threads"]
    except AttributeError as error:
        raise MachineError("library-refused", f"threads={threads}: torch's libraries have no such setting: {error}") from None
    set_mkl: Any = getattr(library, "MKL_Set_Num_Threads_Local", _ignore)  # only x86 builds of torch have it

    def threaded(*arguments: Any) -> int:
        first_use()
        before, mkl_before = get_openmp(), 0  # MKL's own number, where an interrupt comes before it is known
        try:
            mkl_before = set_mkl(threads)
            set_openmp(threads)
            return run(*arguments)
        finally:
            try:
                set_openmp(before)
            finally:
                set_mkl(mkl_before)

    return threaded


def _ignore(threads: int) -> int:
    return threads
