"""What another thread does for a program, beside its load or its calls.

Making a GPU's context takes 0.2 s, as long as everything else in loading a bundle together, and needs nothing but the device's
number.  So it is made while the runtime's modules are imported and the bundle is checked.  And where there are many int_keys, a
program answers before all of their graphs are built.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from ..errors import CgbundleError


class Released(Protocol):
    """What is given back when nobody takes it."""

    def release(self) -> None: ...


Made = TypeVar("Made", bound=Released)


class ContextFuture(Generic[Made]):
    """What `make` gives, begun at once; None makes nothing."""

    def __init__(self, make: Callable[[], Made] | None) -> None:
        self._context: Made | None = None
        self._error: CgbundleError | None = None
        self._thread: threading.Thread | None = None
        if make is not None:
            self._thread = threading.Thread(target=self._run, args=(make,), name="cgbundle-context")
            self._thread.start()

    def take(self) -> Made | None:
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
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, make: Callable[[], Made]) -> None:
        try:
            self._context = make()
        except CgbundleError as error:
            self._error = error


PAUSE = 1e-3
"""Seconds between two steps: whoever calls meanwhile finds the interpreter's lock free."""


class Background:
    """The steps of an iterator, taken in another thread from now on.  An error ends them: who needs what is missing meets it too.

    The end of the process waits for that thread, and so does `stop`.
    """

    def __init__(self, steps: Iterator[None]) -> None:
        self._steps, self._stopped = steps, threading.Event()
        self._thread = threading.Thread(target=self._run, name="cgbundle-background")
        self._thread.start()

    def stop(self) -> None:
        """Returns when no step runs any more; may be called twice, and by a step."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        with suppress(CgbundleError):
            for _ in self._steps:
                if self._stopped.wait(PAUSE):
                    return
