"""Sums of seconds by name, over all requests since the start."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class Spans:
    """Seconds by name; thread-safe."""

    def __init__(self) -> None:
        self._seconds = defaultdict[str, float](float)
        self._lock = Lock()

    @contextmanager
    def span(self, name: str, requests: int = 1) -> Iterator[None]:
        """Adds the block's time for each of `requests` requests, which all wait for it."""
        began = time.perf_counter()
        yield
        self.add(name, (time.perf_counter() - began) * requests)

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._seconds[name] += seconds

    @property
    def seconds(self) -> dict[str, float]:
        with self._lock:
            return dict(self._seconds)
