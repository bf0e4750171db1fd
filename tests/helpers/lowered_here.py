"""Cross-compiled builds, lowered in this process: a worker imports torch and Inductor first, for five seconds."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import pytest

from cgcompile.offline.lower import jobs
from cgcompile.offline.lower.worker import work
from cgcompile.util.workers import Kind, Request


def lower_here(patch: pytest.MonkeyPatch) -> None:
    """As long as `patch` holds.  Builds with workers: tests/cpu/pipeline/test_build_offline.py."""

    def answers(kind: Kind, requests: Mapping[Hashable, Request], seconds: float | None = None) -> Iterator[tuple[Hashable, Any]]:
        for name, request in requests.items():
            yield name, work(request.content)  # type: ignore[arg-type]

    patch.setattr(jobs, "ask", answers)
