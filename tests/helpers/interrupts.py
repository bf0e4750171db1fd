"""Runs code once for every point where CPython can run a signal handler, and raises an interrupt at that point.

CPython (3.11 to 3.14) checks for signals before the first line of a Python function, after a call of a C function, and where a loop
jumps back. In the first two cases CPython calls a profile function; its exception appears where an exception of a signal handler
would. CPython also calls it when a generator is destroyed, but does not check for signals there. So code of generators has no
points here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.helpers.places import ROOT

MOST = 5000
"""Largest number of points in one run."""

INSIDE = (*[str(path) for path in (ROOT / "bundles/cgbundle").rglob("*.py")], "/threading.py", "/contextlib.py")
"""Files whose code has points."""


class Interrupt(BaseException):
    """Raised where a signal handler would raise its exception."""


@contextmanager
def interrupted_at(number: int, behind: str = "") -> Iterator[list[str]]:
    """Raises Interrupt at the point with this number, counted from 0, and yields a list that then holds the point. `behind`: the
    qualified name of a Python function that is treated like a C function: its only points are after its calls."""
    points, count = list[str](), 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        code = frame.f_code
        if code.co_flags & inspect.CO_GENERATOR:
            return
        if code.co_qualname == behind:
            if event != "return":
                return
            at = f"behind {behind}"
        elif event in ("call", "c_return") and code.co_filename.endswith(INSIDE):
            at = f"{code.co_filename.removeprefix(str(ROOT))}:{frame.f_lineno} {event} {code.co_qualname}"
        else:
            return
        count += 1
        if count == number + 1:
            points.append(at)
            raise Interrupt

    sys.setprofile(profile)
    try:
        yield points
    finally:
        sys.setprofile(None)


def at_every_point(act: Callable[[], object], check: Callable[[str], None], behind: str = "") -> list[str]:
    """Runs `act` once for each of its points and interrupts it there. After each run, calls `check` with the point. Returns the
    points whose interrupts were swallowed."""
    lost = list[str]()
    for number in range(MOST):
        points: list[str] = []
        try:
            with interrupted_at(number, behind) as points:
                act()
        except Interrupt:
            pass
        else:
            lost += points
        if not points:
            return lost
        check(points[0])
    raise AssertionError(f"more than {MOST} points")
