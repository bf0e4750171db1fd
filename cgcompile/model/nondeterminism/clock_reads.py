"""Where a call reads the clock, or random bytes of the system: neither leaves a trace that could be compared."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from ..user_code import INSTALLED, is_user_file, line_of

_KINDS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")

CLOCKS: dict[Any, str] = {
    **{getattr(time, name): f"time.{name}" for kind in _KINDS for name in (kind, f"{kind}_ns")},
    datetime.datetime.now: "datetime.now",
    datetime.datetime.utcnow: "datetime.utcnow",
    datetime.datetime.today: "datetime.today",
    datetime.date.today: "date.today",
}

SYSTEM: dict[Any, str] = {os.urandom: "os.urandom", **({os.getrandom: "os.getrandom"} if hasattr(os, "getrandom") else {})}

STEPS = (0.37, 12345.61, 43200.5, 4 * 86400 + 21600.25, 1e8 + 0.37)
"""Seconds by which clocks are put forward: what is made of a fraction, an hour, a weekday or a year shows in one of them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Read:
    """A read of a clock, or of the system's random bytes: what was called, at which of the user's lines."""

    name: str
    where: str
    source: str
    function: Any
    globals: dict[str, Any]


@contextmanager
def outside_reads(model: torch.nn.Module) -> Iterator[list[Read]]:
    """The reads of the model's own code meanwhile, each line once.  None where a profiler is at work: there can be one."""
    reads: list[Read] = []
    if sys.getprofile() is not None:
        yield reads
        return
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()}

    def seen(frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or (function not in CLOCKS and function not in SYSTEM):
            return
        caller = frame if function in CLOCKS else _past_library(frame)
        file = caller.f_code.co_filename
        installed = INSTALLED.match(file) and caller.f_globals.get("__name__", "").partition(".")[0] not in packages
        if is_user_file(file) and not installed:
            where, source = line_of(file, caller.f_lineno)
            name = CLOCKS.get(function) or SYSTEM[function]
            if not any((read.where, read.name) == (where, name) for read in reads):
                reads.append(Read(name=name, where=where, source=source, function=function, globals=caller.f_globals))

    sys.setprofile(seen)
    try:
        yield reads
    finally:
        sys.setprofile(None)


def _past_library(frame: FrameType) -> FrameType:
    """The innermost frame that is not the standard library's: `secrets` and `uuid` read in its name."""
    home = os.path.dirname(os.__file__) + os.sep
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and (not file.startswith(home) or "site-packages" in file):
            break
        frame = frame.f_back
    return frame


@contextmanager
def put_forward(reads: Sequence[Read], seconds: float) -> Iterator[None]:
    """Meanwhile the clocks that were read, of module `time`, are ahead by so much, under whichever name they were called."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for read in reads:
        if read.name.startswith("time."):
            for names in (vars(time), read.globals):
                for name in [name for name, value in names.items() if value is read.function]:
                    changed.append((names, name, read.function))
                    names[name] = _ahead(read.function, seconds)
    try:
        yield
    finally:
        for names, name, function in changed:
            names[name] = function


def _ahead(clock: Callable[[], Any], seconds: float) -> Callable[[], Any]:
    def ahead() -> Any:
        now = clock()
        return now + (round(seconds * 1e9) if isinstance(now, int) else seconds)

    return ahead
