"""Finds reads of the clock and of the system's random bytes, and prints.  They change no state, so they must be observed during the
call."""

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

PRINT: Any = print

STEPS = (0.37, 12345.61, 43200.5, 4 * 86400 + 21600.25, 1e8 + 0.37)
"""Offsets for clocks, in seconds.  At least one changes a value computed from a fraction of a second, an hour, a weekday or a
year."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Read:
    """A read of a clock or of the system's random bytes, or a print: the function, and the user's line that calls it."""

    name: str
    where: str
    source: str
    function: Any
    globals: dict[str, Any]


@contextmanager
def outside_reads(model: torch.nn.Module) -> Iterator[list[Read]]:
    """Collects the reads of the model's own code inside this context, once per line and function.  Collects nothing if a profiler
    is active, because Python supports only one."""
    reads: list[Read] = []
    if sys.getprofile() is not None:
        yield reads
        return
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()}

    def profile(frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or (function not in CLOCKS and function not in SYSTEM and function is not PRINT):
            return
        caller = _past_library(frame) if function in SYSTEM else frame
        file = caller.f_code.co_filename
        installed = INSTALLED.match(file) and caller.f_globals.get("__name__", "").partition(".")[0] not in packages
        if is_user_file(file) and not installed:
            where, source = line_of(file, caller.f_lineno)
            name = CLOCKS.get(function) or SYSTEM.get(function) or "print"
            if not any((read.where, read.name) == (where, name) for read in reads):
                reads.append(Read(name=name, where=where, source=source, function=function, globals=caller.f_globals))

    sys.setprofile(profile)
    try:
        yield reads
    finally:
        sys.setprofile(None)


def _past_library(frame: FrameType) -> FrameType:
    """Returns the innermost frame outside of the standard library, whose `secrets` and `uuid` read random bytes for their
    callers."""
    home = os.path.dirname(os.__file__) + os.sep
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and (not file.startswith(home) or "site-packages" in file):
            break
        frame = frame.f_back
    return frame


@contextmanager
def put_forward(reads: Sequence[Read], seconds: float) -> Iterator[None]:
    """Adds `seconds` to the clocks of module `time` that were read, under all their names, inside this context."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for read in reads:
        if read.name.startswith("time."):
            for names in (vars(time), read.globals):
                for name in [name for name, value in names.items() if value is read.function]:
                    replaced.append((names, name, read.function))
                    names[name] = _ahead(read.function, seconds)
    try:
        yield
    finally:
        for names, name, function in replaced:
            names[name] = function


def _ahead(clock: Callable[[], Any], seconds: float) -> Callable[[], Any]:
    def ahead() -> Any:
        now = clock()
        return now + (round(seconds * 1e9) if isinstance(now, int) else seconds)

    return ahead
