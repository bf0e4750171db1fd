"""The processor's instructions, threads and memory for CPU code. OpenMP ignores quotas of containers (`docker --cpus`,
`limits.cpu`), and would start a thread for each of the host's processors; waiting for each other, these use up the quota. Source:
Linux, CFS bandwidth control; cpu.max and memory.max of cgroup v2, cpu.cfs_quota_us and memory.limit_in_bytes of v1."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import MachineError

if TYPE_CHECKING:
    import ctypes  # few functions need it

HINT = "build the bundle on this kind of machine, or for a level of processors: --target x86-64-v3 (all with AVX2), armv8-a"
"""For a bundle of the cpu target."""

BY_NAME_ALONE = frozenset((
    "rdrand", "rdseed", "rdpid", "clflushopt", "clwb", "cldemote", "fsgsbase", "pku", "xsave", "xsaveopt", "xsavec", "xsaves",
    "wbnoinvd",
))  # fmt: skip
"""Instructions that compilers use only if the source names them, which the code of a model never does. Bundles list all features of
their compiler's target."""

SVE_LENGTH = 51
"""PR_SVE_GET_VL (include/uapi/linux/prctl.h): aarch64's vector length in bytes in the low 16 bits."""


def check_features(features: Iterable[str], hint: str = "build the bundle on this kind of machine") -> None:
    needed = set(features) - BY_NAME_ALONE
    missing = sorted(needed - processor_flags()) if needed else []
    if missing:
        raise MachineError("wrong-machine", f"this processor lacks {', '.join(missing)}, which the bundle's code uses", hint)


def processor_name() -> str:
    return _first("model name") or os.uname().machine


def processor_flags() -> frozenset[str]:
    """Flags of the first processor in /proc/cpuinfo, or none; with `sve256` for 256-bit SVE, because code may need one vector
    length."""
    flags = frozenset(_first("flags", "Features").split())
    return flags | {f"sve{8 * _vector_bytes()}"} if "sve" in flags else flags


def _vector_bytes() -> int:
    import ctypes  # needed on aarch64 only

    return max(0, int(ctypes.CDLL(None).prctl(SVE_LENGTH, 0, 0, 0, 0))) & 0xFFFF


def _first(*names: str) -> str:
    """The first of these entries in /proc/cpuinfo, or ""."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(names)), "")
    except FileNotFoundError:
        return ""


# --- quotas of containers ---------------------------------------------------------------------------------------------

NUMBER = "OMP_NUM_THREADS"  # OpenMP's own setting has precedence


def threads_of_quota(root: str = "/") -> int | None:
    """The number of threads that a quota allows, at least one; None without a quota below the number of processors, or if the
    environment has a number."""
    if NUMBER in os.environ:
        return None
    shares = []  # in processors, which may be fractions
    for folder, old in _groups(root, "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if old else ("cpu.max",)
        quota, period, *_ = [*" ".join([_read(os.path.join(folder, name)) for name in names]).split(), "", ""]
        if quota.isdigit() and period.isdigit() and int(period):  # not "max", nor -1
            shares.append(int(quota) / int(period))
    number = max(1, int(min(shares))) if shares else None
    return number if number is not None and number < len(os.sched_getaffinity(0)) else None


def memory_of_quota(root: str = "/") -> int:
    """Bytes that the process may use: the machine's, or fewer by a control group."""
    limits = [
        _read(os.path.join(folder, "memory.limit_in_bytes" if old else "memory.max")) for folder, old in _groups(root, "memory")
    ]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *[int(limit) for limit in limits if limit.isdigit()]])


def free_memory(root: str = "/") -> int:
    rows = dict([line.split(":", 1) for line in _read(os.path.join(root, "proc/meminfo")).splitlines()])
    return min(int(rows["MemAvailable"].split()[0]) << 10, memory_of_quota(root))


def _groups(root: str, kind: str) -> Iterator[tuple[str, bool]]:
    """(folder, whether it is version 1) of the process's control groups and their parents. A container sees its group as the
    root."""
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, kinds, group = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        top = os.path.join(root, "sys/fs/cgroup", kind if kinds else "")
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            yield os.path.join(top, *parts[:depth]), bool(kinds)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


# --- numbers of threads -----------------------------------------------------------------------------------------------

MOST = 1024  # with more threads a process may fail to start them, and OpenMP ends it
_FIRST_USE = "_ZN2at15get_num_threadsEv"


def check_number(threads: object) -> None:
    if not (type(threads) is int and 1 <= threads <= MOST):
        raise ValueError(f"threads={threads!r}: expected an integer from 1 to {MOST}, or None")


def with_threads(run: Callable[..., int], library: ctypes.CDLL, threads: int) -> Callable[..., int]:
    """`run` with `threads` threads of OpenMP and of MKL (torch's matrix products); `library` is torch's. Raises library-refused.
    Both numbers belong to the calling thread (OpenMP 5.2, nthreads-var; MKL_Set_Num_Threads_Local): each run sets and restores
    them. torch overwrites OpenMP's number at its first use in a thread, so each run begins with this use. Private in torch (2.11,
    2.13): the C++ symbol of `at::get_num_threads()`."""
    try:
        first_use, get_openmp, set_openmp = library[_FIRST_USE], library["omp_get_max_threads"], library["omp_set_num_threads"]
    except AttributeError as error:
        raise MachineError("library-refused", f"threads={threads}: torch's libraries have no such setting: {error}") from None
    set_mkl: Any = getattr(library, "MKL_Set_Num_Threads_Local", lambda threads: threads)  # only x86 builds of torch have it

    def threaded(*arguments: Any) -> int:
        first_use()
        before, mkl_before = get_openmp(), 0  # 0 restores MKL's default, if an interrupt comes before its number is known
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
