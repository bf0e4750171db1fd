"""Interrupts at every point of some code where the interpreter can raise that of a signal's handler: one run for each point.

CPython (3.11 to 3.14) asks for signals before the first line of a function of Python, behind a call of one of C, and where a loop
goes back.  A profile function is called at the first two, and an exception that it raises lands where a handler's would.  It is
also called where a generator is thrown away, where nobody asks: generators have no points here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.helpers.places import ROOT

MOST = 5000
"""Points of one run."""

INSIDE = (*[str(path) for path in (ROOT / "bundles/cgbundle").rglob("*.py")], "/threading.py", "/contextlib.py")
"""Files in which there are points."""


class Interrupt(BaseException):
    """What a handler raises."""


@contextmanager
def interrupted_at(number: int, behind: str = "") -> Iterator[list[str]]:
    """Raises Interrupt at the point with this number, from 0; the list has that point then.  `behind`: the qualified name of a
    function of Python that stands for those of C: there is a point behind each of its calls."""
    met, count = list[str](), 0

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
            met.append(at)
            raise Interrupt

    sys.setprofile(profile)
    try:
        yield met
    finally:
        sys.setprofile(None)


def at_every_point(act: Callable[[], object], check: Callable[[str], None], behind: str = "") -> list[str]:
    """Runs `act` once for each of its points, interrupted there, and `check` behind it, which is told the point.  Gives the points
    whose interrupts were lost."""
    lost = list[str]()
    for number in range(MOST):
        met: list[str] = []
        try:
            with interrupted_at(number, behind) as met:
                act()
        except Interrupt:
            pass
        else:
            lost += met
        if not met:
            return lost
        check(met[0])
    raise AssertionError(f"more than {MOST} points")
