"""Work in forked processes: answers in order, errors with their code, killed processes, matrix products on several threads."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cgcompile.errors import BuildError
from cgcompile.util import workers
from cgcompile.util.progress import Tell
from cgcompile.util.workers import Work, run_forked
from tests.helpers.raising import raises


def answers(works: Mapping[int, Work], logs: Path, messages: list[str] | None = None) -> dict[int, Any]:
    messages = [] if messages is None else messages
    return run_forked(works, {key: messages.append for key in works}, logs, "worker-died")


def twice(number: int, tell: Tell) -> tuple[int, int]:
    tell(f"doubling {number}")
    time.sleep(0.02 * (3 - number))
    return 2 * number, os.getpid()


def test_each_work_has_its_own_process_and_answers_are_in_order(tmp_path: Path) -> None:
    messages = list[str]()
    results = answers({number: partial(twice, number) for number in range(3)}, tmp_path, messages)
    assert [value for value, _ in results.values()] == [0, 2, 4] and list(results) == [0, 1, 2]
    assert len({os.getpid(), *[process for _, process in results.values()]}) == 4
    assert sorted(messages) == ["doubling 0", "doubling 1", "doubling 2"]


def test_forked_processes_use_threads_after_the_parent_started_libgomp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.ones(512, 512)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = (large @ large).exp2().sum().item()  # starts the threads of libgomp in this process
        results = answers({number: lambda tell: (large @ large).exp2().sum().item() for number in range(2)}, tmp_path)
    finally:
        torch.set_num_threads(before)
    assert results == {0: expected, 1: expected}


def refuse(tell: Tell) -> None:
    raise BuildError("not-standalone", "no sort", "use torch")


def wait_for_child(folder: Path, tell: Tell) -> None:
    process = subprocess.Popen(["sleep", "600"], process_group=0)
    (folder / "pids").write_text(f"{process.pid} {os.getpid()}")
    process.wait()


def refuse_later(folder: Path, tell: Tell) -> None:
    while not (folder / "pids").exists() or not (folder / "pids").read_text():
        time.sleep(0.01)
    refuse(tell)


def test_the_first_error_kills_all_processes_and_their_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "processors", lambda: 2)
    with raises("not-standalone", match="no sort"):
        answers({0: partial(wait_for_child, tmp_path), 1: partial(refuse_later, tmp_path)}, tmp_path)
    assert not [process for process in (tmp_path / "pids").read_text().split() if runs(process)]


def runs(process: str) -> bool:
    """Returns whether a process still runs.  A zombie has ended, and its parent has not waited for it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_error_has_the_signal_or_the_last_line_of_the_output(tmp_path: Path) -> None:
    with raises("worker-died", match="was killed by SIGKILL: it wrote nothing"):
        answers({0: lambda tell: os.kill(os.getpid(), signal.SIGKILL)}, tmp_path)
    with raises("worker-died", match="ended without an answer: ZeroDivisionError: integer division"):
        answers({0: lambda tell: 1 // 0}, tmp_path)
