"""The time limit of a search."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...errors import BuildError
from ...util.progress import Tell


class SearchEnded(Exception):
    """Raised if the time limit was reached, so that the current lowering is left out."""


class Deadline:
    """A time limit of `seconds` from its construction; None means no limit."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock, self._begun = seconds, clock, clock()

    def left(self) -> float | None:
        """Returns the remaining seconds, or None without a limit."""
        return None if self.seconds is None else max(0.0, self.seconds - (self._clock() - self._begun))

    def end(self) -> None:
        """Ends the time limit now."""
        self.seconds = 0.0

    def passed(self) -> bool:
        """Whether the time limit was reached."""
        return self.left() == 0.0

    def telling(self, tell: Tell) -> Tell:
        """Wraps `tell` so that it raises SearchEnded after the time limit."""

        def checked_tell(text: str) -> None:
            if self.passed():
                raise SearchEnded
            tell(text)

        return checked_tell

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Calls `end` from another thread if the time limit is reached while the body runs.  A later BuildError of the body becomes
        SearchEnded."""
        remaining, ended = self.left(), threading.Event()
        if remaining is None:
            yield
            return

        def stop() -> None:
            ended.set()
            end()

        timer = threading.Timer(remaining, stop)
        timer.daemon = True
        timer.start()
        try:
            yield
        except BuildError as error:
            if ended.is_set():
                raise SearchEnded from error
            raise
        finally:
            timer.cancel()
            timer.join()
