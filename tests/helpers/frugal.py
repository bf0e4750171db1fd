"""Measures the time and memory of a function in a forked process."""

from __future__ import annotations

import gc
import json
import os
import resource
import time
from collections.abc import Callable


def cost(work: Callable[[], str], limit: int = 20) -> tuple[str, float, float]:
    """Returns (the result of `work`, seconds, MiB by which the process grew at most). The child is killed after `limit` seconds of
    CPU time. It shares the parent's pages: live memory of the parent does not count, and memory that the parent freed may hide a
    few MiB.
    """
    read, write = os.pipe()
    gc.collect()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(read)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            before = _resident()
            begin = time.process_time()
            try:
                outcome = work()
            except BaseException as error:  # noqa: BLE001 (the parent checks which error it is)
                outcome = f"{type(error).__module__}.{type(error).__name__}: {error}"[:500]
            seconds = time.process_time() - begin
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
            os.write(write, json.dumps([outcome, seconds, grown]).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if not data:
        return f"ended with status {os.waitstatus_to_exitcode(status)}", float(limit), 0.0
    outcome, seconds, grown = json.loads(data)
    return outcome, seconds, grown


def _resident() -> float:
    """Returns the resident memory in MiB. In a forked process, ru_maxrss starts at this value."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)
