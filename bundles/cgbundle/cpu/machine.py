"""What code for the CPU may use of this machine: instructions of its processor, threads and memory.

OpenMP counts the processors that a process may run on, and knows no quota of a container (`docker --cpus`, `limits.cpu` of a pod):
it would start a thread for each of the host's.  They use the time up while they wait for one another, and are stopped together.
Source: CFS bandwidth control in the documentation of Linux, cpu.max and memory.max of cgroup v2, cpu.cfs_quota_us and
memory.limit_in_bytes of v1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import MachineError

if TYPE_CHECKING:
    import ctypes  # which few of these need

HINT = "build the bundle on this kind of machine, or for a level of processors: --target x86-64-v3 (all with AVX2), armv8-a"
"""For a bundle of the cpu target."""

BY_NAME_ALONE = frozenset((
    "rdrand", "rdseed", "rdpid", "clflushopt", "clwb", "cldemote", "fsgsbase", "pku", "xsave", "xsaveopt", "xsavec", "xsaves",
    "wbnoinvd",
))  # fmt: skip
"""Instructions that no compiler chooses by itself: code has them where its source names them, which that of a model never does.
A bundle names all that its compiler could have written."""

SVE_LENGTH = 51
"""prctl's PR_SVE_GET_VL (include/uapi/linux/prctl.h): aarch64's bytes of a vector in the low 16 bits."""


def check_features(features: Iterable[str], hint: str = "build the bundle on this kind of machine") -> None:
    """Raises wrong-machine, naming what is missing, unless this processor has all of `features` that code can use unasked."""
    wanted = set(features) - BY_NAME_ALONE
    missing = sorted(wanted - processor_flags()) if wanted else []
    if missing:
        raise MachineError("wrong-machine", f"this processor lacks {', '.join(missing)}, which the bundle's code uses", hint)


def processor_name() -> str:
    """The model of the first processor, else the machine's kind."""
    return _first("model name") or os.uname().machine


def processor_flags() -> frozenset[str]:
    """The flags of the first processor, as /proc/cpuinfo names them (empty where they are not known); and `sve256` where vectors of
    SVE have 256 bits: code may be compiled for one length alone."""
    flags = frozenset(_first("flags", "Features").split())
    return flags | {f"sve{8 * _vector_bytes()}"} if "sve" in flags else flags


def _vector_bytes() -> int:
    import ctypes  # aarch64 alone comes here

    return max(0, int(ctypes.CDLL(None).prctl(SVE_LENGTH, 0, 0, 0, 0))) & 0xFFFF


def _first(*names: str) -> str:
    """The first of these entries in /proc/cpuinfo; "" where there is no such file or entry."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(names)), "")
    except FileNotFoundError:
        return ""


# --- quotas of containers ---------------------------------------------------------------------------------------------

NUMBER = "OMP_NUM_THREADS"
"""Where OpenMP's number is given, that is what a program uses."""


def threads_of_quota(root: str = "/") -> int | None:
    """How many threads can run all the time, one at least, where that is fewer than the processors that the process may run on.

    None where there is no such quota, or the environment says a number.
    """
    if NUMBER in os.environ:
        return None
    shares = [share for share in (_share(text) for text in _quotas(root)) if share is not None]
    number = max(1, int(min(shares))) if shares else None
    return number if number is not None and number < len(os.sched_getaffinity(0)) else None


def memory_of_quota(root: str = "/") -> int:
    """Bytes that the process may have: those of the machine, or fewer where a control group says so."""
    limits = [
        _read(os.path.join(folder, "memory.limit_in_bytes" if old else "memory.max")) for folder, old in _groups(root, "memory")
    ]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *[int(limit) for limit in limits if limit.isdigit()]])


def free_memory(root: str = "/") -> int:
    """Bytes that the process could get now, as far as the machine and its control groups know."""
    rows = dict([line.split(":", 1) for line in _read(os.path.join(root, "proc/meminfo")).splitlines()])
    return min(int(rows["MemAvailable"].split()[0]) << 10, memory_of_quota(root))


def _quotas(root: str) -> Iterator[str]:
    """Quota and period, in microseconds."""
    for folder, old in _groups(root, "cpu"):
        if old:
            yield f"{_read(os.path.join(folder, 'cpu.cfs_quota_us'))} {_read(os.path.join(folder, 'cpu.cfs_period_us'))}"
        else:
            yield _read(os.path.join(folder, "cpu.max"))


def _groups(root: str, kind: str) -> Iterator[tuple[str, bool]]:
    """The folders of the process's control groups of a kind and of those above, and whether they are version 1's.  Inside a
    container its own is the top."""
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, kinds, group = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        top = os.path.join(root, "sys/fs/cgroup", kind if kinds else "")
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            yield os.path.join(top, *parts[:depth]), bool(kinds)


def _share(text: str) -> float | None:
    """Processors' worth of time; None for "max", for -1, and for what is not there."""
    quota, _, period = text.strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.strip().isdigit() and int(period) else None


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


# --- numbers of threads -----------------------------------------------------------------------------------------------

MOST = 1024
"""Beyond that a process may fail to start them, which OpenMP ends it for."""

_FIRST_USE = "_ZN2at15get_num_threadsEv"


def check_number(threads: object) -> None:
    """Raises ValueError unless it is a number of threads, from 1 to `MOST`."""
    if not (type(threads) is int and 1 <= threads <= MOST):
        raise ValueError(f"threads={threads!r}: expected an integer from 1 to {MOST}, or None")


def with_threads(run: Callable[..., int], library: ctypes.CDLL, threads: int) -> Callable[..., int]:
    """`run` with that many threads, of OpenMP, which compiled code and torch run on, and of MKL, torch's products; `library` is
    torch's, and leads to those under it.  Raises library-refused.

    Both numbers are the calling thread's own (OpenMP 5.2, nthreads-var; MKL_Set_Num_Threads_Local), so that each run sets and
    restores them, and programs with different numbers share a process.  torch would overwrite OpenMP's at its first use in a
    thread: it is asked for its number before.  Private of torch (2.11, 2.13): the C++ symbol of `at::get_num_threads()`.
    """
    try:
        first_use, get_openmp, set_openmp = library[_FIRST_USE], library["omp_get_max_threads"], library["omp_set_num_threads"]
    except AttributeError as error:
        raise MachineError("library-refused", f"threads={threads}: torch's libraries have no such setting: {error}") from None
    set_mkl: Any = getattr(library, "MKL_Set_Num_Threads_Local", lambda threads: threads)  # only x86 builds of torch have it

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
