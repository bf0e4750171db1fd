"""What a piece of work costs: its time and memory, seen in a process that is forked for it alone."""

from __future__ import annotations

import gc
import json
import os
import resource
import time
from collections.abc import Callable


def cost(work: Callable[[], str], limit: int = 20) -> tuple[str, float, float]:
    """(what `work` returned, seconds, MiB by which the process grew at the most).  Killed after `limit` seconds of processor time.

    The child shares the parent's pages: what the parent holds does not count, what it had freed may hide a few MiB.
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
            except BaseException as error:  # noqa: BLE001 (the parent asserts what it is)
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
    """MiB that are in memory now: the most ever of a forked process begins there."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)
