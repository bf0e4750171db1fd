"""Recorder processes that are stopped while somebody waits for them."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgcompile.capture.processes import Process, RecorderProcesses, recorder_processes
from cgcompile.capture.request import PRIME, RECORD
from cgcompile.pipeline.best.deadline import Deadline, SearchEnded
from tests.helpers.raising import raises


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[subprocess.Popen[str]]:
    """Processes that never answer."""
    started: list[subprocess.Popen[str]] = []

    def new(self: RecorderProcesses, role: str, number: int, threads: int) -> Process:
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(["sleep", "600"], stdin=pipe, stdout=pipe, text=True, process_group=0))
        log = tmp_path / f"{role}{number}.log"
        log.write_text("importing torch\n")
        return Process(name=f"{role}{number}", running=started[-1], log=log)

    monkeypatch.setattr(RecorderProcesses, "_new", new)
    return started


def test_a_search_that_is_over_stops_what_records(sleeping: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    request: Any = SimpleNamespace(role=RECORD, result=tmp_path / "result")
    begun = time.monotonic()
    with recorder_processes(tmp_path) as processes:
        with pytest.raises(SearchEnded), Deadline(0.2).ending(processes.stop):
            processes.run([request, request], print, 2)
        assert time.monotonic() - begun < 30 and len(sleeping) == 2
        assert all(process.returncode is not None for process in sleeping)
        with raises("recorder-failed", match="were stopped"):
            processes.start(PRIME, 1)
        assert len(sleeping) == 2
