"""Lowers cross-compiled builds in this process: a worker would first import torch and Inductor, which takes five seconds."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import pytest

from cgcompile.offline.lower import jobs
from cgcompile.offline.lower.worker import work
from cgcompile.util.workers import Kind, Request


def lower_here(patch: pytest.MonkeyPatch) -> None:
    """Patches `jobs.ask` until `patch` is undone. tests/cpu/pipeline/test_build_offline.py tests builds with workers."""

    def answers(kind: Kind, requests: Mapping[Hashable, Request], seconds: float | None = None) -> Iterator[tuple[Hashable, Any]]:
        for name, request in requests.items():
            yield name, work(request.content)  # type: ignore[arg-type]

    patch.setattr(jobs, "ask", answers)
