"""Counts calls of the driver."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Counting:
    """Passes calls to the driver and counts them by name."""

    def __init__(self, real: Any) -> None:
        self.real, self.calls = real, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.real, name)
