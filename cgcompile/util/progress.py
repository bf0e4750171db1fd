"""What a build tells whoever watches it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """`state` is start, detail or done; `seconds` since the stage began (0.0 at start)."""

    stage: str
    state: str
    text: str
    seconds: float


Watcher = Callable[[Event], None]
Tell = Callable[[str], None]
"""What a stage says of its progress."""


def silent(event: Event) -> None:
    """The watcher of a build that nobody watches."""


class Stages:
    """Runs stages, `with stages("lower") as tell: ... tell("3 of 12 kernels")`, and remembers how long each took."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.seconds: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, stage: str) -> Iterator[Callable[[str], None]]:
        start = time.perf_counter()
        last = ""

        def tell(text: str) -> None:
            nonlocal last
            last = text
            self._watcher(Event(stage=stage, state="detail", text=text, seconds=time.perf_counter() - start))

        self._watcher(Event(stage=stage, state="start", text="", seconds=0.0))
        yield tell
        taken = time.perf_counter() - start
        self.seconds.append((stage, taken))
        self._watcher(Event(stage=stage, state="done", text=last, seconds=taken))
