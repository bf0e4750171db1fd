"""Recorder processes that end while the build waits for their answer."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgcompile.capture import processes as module
from cgcompile.capture.processes import recorder_processes
from cgcompile.capture.request import PRIME, RECORD
from cgcompile.pipeline.best.deadline import Deadline, SearchEnded
from tests.helpers.raising import raises


def test_a_search_that_is_over_stops_what_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "WORKER", "tests.helpers.forked_worker")  # this worker never reports that it is done
    request: Any = SimpleNamespace(role=RECORD, result=tmp_path / "result")
    with recorder_processes(tmp_path) as processes:
        begun = time.monotonic()
        with pytest.raises(SearchEnded), Deadline(0.2).ending(processes.stop):
            processes.run([request, request], print, 2)
        assert time.monotonic() - begun < 30
        with raises("recorder-failed", match="were stopped"):
            processes.start(PRIME, 1)
