"""`observe`: records the kernel images that this process loads, and the line of Python that added each node to a graph."""

from __future__ import annotations

import atexit
import os
import sys
from functools import cache
from typing import TYPE_CHECKING

from ...errors import BuildError

if TYPE_CHECKING:
    from ..worker import image_log as worker_log

LIBRARIES = ("torch", "triton", "cgcompile", "cgbundle")
"""Packages whose lines are skipped in the search for the engine's line."""


def observe() -> None:
    """Starts to record the kernel images that this process loads.  `save_graphs` needs them.

    Call it before anything uses CUDA: images that were loaded earlier cannot be recorded.  It compiles a small file, which needs a
    C++ compiler.  Captures take longer, so call it only in processes that save graphs.  A second call does nothing.  Raises
    observe-late, extra-missing, cupti-unavailable, compiler-failed.
    """
    image_log()


def observed() -> worker_log.EngineImageLog:
    """Returns the log that `observe` started.  Raises not-observed."""
    if not image_log.cache_info().currsize:
        raise BuildError("not-observed", "save_graphs: cgcompile.observe() was not called in this process")
    return image_log()


@cache  # CUPTI has one subscriber in a process
def image_log() -> worker_log.EngineImageLog:
    """Returns the log of this process.  The first call subscribes to CUPTI.  Raises what `observe` does."""
    try:
        from ..worker.image_log import EngineImageLog
    except ImportError as error:
        raise BuildError("extra-missing", f"observe: {error}", "pip install 'cgcompile[cuda]'") from None
    if _has_begun():
        raise BuildError("observe-late", "observe: this process uses CUDA already, and images that it loaded are not known")
    log = EngineImageLog(line)
    atexit.register(log.close)  # libraries unload kernels in destructors, and CUPTI must not call back then
    return log


def _has_begun() -> bool:
    """Whether the primary context of any GPU is active."""
    from ..worker.driver import check, driver, succeeded

    counted = driver.cuDeviceGetCount()
    if not succeeded(counted):
        return False  # cuInit was not called
    devices = [check(driver.cuDeviceGet(number)) for number in range(int(counted[1]))]
    return any(int(check(driver.cuDevicePrimaryCtxGetState(device))[1]) for device in devices)


def line() -> str:
    """Returns file:line of the innermost running Python frame outside LIBRARIES, or ""."""
    folders = tuple([os.path.dirname(path) + os.sep for path in map(_file, LIBRARIES) if path])
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(folders) and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _file(package: str) -> str:
    return getattr(sys.modules.get(package), "__file__", None) or ""
