"""When a search has to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...errors import BuildError
from ...util.progress import Tell


class SearchEnded(Exception):
    """The seconds of a search are over: what was going on is left out."""


class Deadline:
    """`seconds` from when it was made; None for never."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock, self._begun = seconds, clock, clock()

    def left(self) -> float | None:
        """Seconds; None where there is no end."""
        return None if self.seconds is None else max(0.0, self.seconds - (self._clock() - self._begun))

    def end(self) -> None:
        """The seconds are over now."""
        self.seconds = 0.0

    def passed(self) -> bool:
        """Whether nothing more is to be begun."""
        return self.left() == 0.0

    def telling(self, tell: Tell) -> Tell:
        """`tell`, which raises SearchEnded from then on."""

        def checked_tell(text: str) -> None:
            if self.passed():
                raise SearchEnded
            tell(text)

        return checked_tell

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Around work that `end` ends, from another thread, when the seconds are over.  Raises SearchEnded in place
        of the error that the work then has."""
        left, ended = self.left(), threading.Event()
        if left is None:
            yield
            return

        def stop() -> None:
            ended.set()
            end()

        timer = threading.Timer(left, stop)
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
