"""Work in another thread during a load or calls. Creating a GPU's context takes 0.2 s, as long as the rest of a load. Graphs of
further int_keys are built while a program already answers."""

from __future__ import annotations

import _thread

from ..errors import CgbundleError

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


class ContextFuture:
    """The context that `make` returns, started at once; without `make` None. Uses `_thread`, because importing `threading` takes
    half as long as everything before it. `make` must not import: the first thread that imports `threading` becomes its main
    thread."""

    def __init__(self, make: Callable[[], Any] | None) -> None:
        self._context: Any = None
        self._error: CgbundleError | None = None
        self._running = _thread.allocate_lock()
        if make is not None:
            self._running.acquire()
            _thread.start_new_thread(self._run, (make,))

    def take(self) -> Any:
        """The context, now the caller's; None without one. Raises what `make` raised."""
        self._join()
        if self._error is not None:
            raise self._error
        context, self._context = self._context, None
        return context

    def drop(self) -> None:
        """Releases the context unless it was taken."""
        self._join()
        if self._context is not None:
            self._context.release()
            self._context = None

    def _join(self) -> None:
        with self._running:  # the other thread holds it until it is done
            return

    def _run(self, make: Callable[[], Any]) -> None:
        try:
            self._context = make()
        except CgbundleError as error:
            self._error = error
        finally:
            self._running.release()


FIRST = 0.03
"""Seconds before the first step: the first call of a new process should not wait for a graph that is being built (17 ms for an 8B
model; tests/gpu/REPORT.md)."""

PAUSE = 1e-3  # seconds between steps, so that callers get the interpreter's lock

QUIET = 0.05
"""Seconds without a replay before a graph of an engine is built.  The engine's thread would wait for the interpreter's lock: with
one lane, vLLM made 5 to 17 % fewer tokens/s until all graphs were built (tests/gpu/REPORT.md)."""


class Background:
    """Runs the steps of an iterator in another thread. A step yields the seconds until the next. An error ends them: a call that
    needs the result will raise it again. `stop` and the end of the process wait for the thread."""

    def __init__(self, steps: Iterator[float]) -> None:
        import threading  # few programs have so many graphs

        self._steps, self._stopped = steps, threading.Event()
        self._thread = threading.Thread(target=self._run, name="cgbundle-background")
        self._thread.start()

    def stop(self) -> None:
        """Returns when no step is running; may be called twice, and by a step."""
        self._stopped.set()
        if self._thread.ident != _thread.get_ident():
            self._thread.join()

    def _run(self) -> None:
        try:
            if self._stopped.wait(FIRST):
                return
            for pause in self._steps:
                if self._stopped.wait(pause):
                    return
        except CgbundleError:
            return
