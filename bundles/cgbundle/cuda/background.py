"""What another thread does for a program, beside its load or its calls.

Making a GPU's context takes 0.2 s, as long as everything else in loading a bundle together, and needs nothing but the device's
number.  So it is made while the runtime's modules are imported and the bundle is checked.  And where there are many int_keys, a
program answers before all of their graphs are built.
"""

from __future__ import annotations

import _thread

from ..errors import CgbundleError

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


class ContextFuture:
    """The context that `make` gives, begun at once; None makes nothing.

    By `_thread`, since `threading` takes half as long to import as all else before it.  `make` must not import: `threading` takes
    the thread that imports it first for the main one.
    """

    def __init__(self, make: Callable[[], Any] | None) -> None:
        self._context: Any = None
        self._error: CgbundleError | None = None
        self._running = _thread.allocate_lock()
        if make is not None:
            self._running.acquire()
            _thread.start_new_thread(self._run, (make,))

    def take(self) -> Any:
        """The context, which is the caller's now; None when none was begun.  Raises what making it raised."""
        self._join()
        if self._error is not None:
            raise self._error
        context, self._context = self._context, None
        return context

    def drop(self) -> None:
        """Gives the context back unless it was taken."""
        self._join()
        if self._context is not None:
            self._context.release()
            self._context = None

    def _join(self) -> None:
        with self._running:  # which the other thread holds until it is done
            return

    def _run(self, make: Callable[[], Any]) -> None:
        try:
            self._context = make()
        except CgbundleError as error:
            self._error = error
        finally:
            self._running.release()


FIRST = 0.03
"""Seconds before the first step.  The first call comes at once where a process was started for it, and would wait for a graph that
is being built: 17 ms of 8B (tests/gpu/REPORT.md)."""

PAUSE = 1e-3
"""Seconds between two steps: whoever calls meanwhile finds the interpreter's lock free."""


class Background:
    """The steps of an iterator, taken in another thread, soon.  An error ends them: who needs what is missing meets it too.

    The end of the process waits for that thread, and so does `stop`.
    """

    def __init__(self, steps: Iterator[None]) -> None:
        import threading  # few programs have so many graphs

        self._steps, self._stopped = steps, threading.Event()
        self._thread = threading.Thread(target=self._run, name="cgbundle-background")
        self._thread.start()

    def stop(self) -> None:
        """Returns when no step runs any more; may be called twice, and by a step."""
        self._stopped.set()
        if self._thread.ident != _thread.get_ident():
            self._thread.join()

    def _run(self) -> None:
        try:
            if self._stopped.wait(FIRST):
                return
            for _ in self._steps:
                if self._stopped.wait(PAUSE):
                    return
        except CgbundleError:
            return
