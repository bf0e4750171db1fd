"""Where the time of requests goes: seconds in named stretches, over all requests since the start."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class Spans:
    """Seconds by name, counted from any thread."""

    def __init__(self) -> None:
        self._seconds = defaultdict[str, float](float)
        self._lock = Lock()

    @contextmanager
    def span(self, name: str, requests: int = 1) -> Iterator[None]:
        """The block is a stretch of so many requests, all of which it keeps waiting."""
        began = time.perf_counter()
        yield
        self.add(name, (time.perf_counter() - began) * requests)

    def add(self, name: str, seconds: float) -> None:
        """So many seconds of some requests."""
        with self._lock:
            self._seconds[name] += seconds

    @property
    def seconds(self) -> dict[str, float]:
        """The sums."""
        with self._lock:
            return dict(self._seconds)
