"""Work in forked processes: answers in order, errors with their code, reported deaths, products on several threads."""

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
from cgcompile.util.workers import Work, side_by_side
from tests.helpers.raising import raises


def answers(works: Mapping[int, Work], logs: Path, messages: list[str] | None = None) -> dict[int, Any]:
    messages = [] if messages is None else messages
    return side_by_side(works, {key: messages.append for key in works}, logs, "worker-died")


def twice(number: int, tell: Tell) -> tuple[int, int]:
    tell(f"doubling {number}")
    time.sleep(0.02 * (3 - number))
    return 2 * number, os.getpid()


def test_answers_come_in_order_from_processes_of_their_own(tmp_path: Path) -> None:
    messages = list[str]()
    results = answers({number: partial(twice, number) for number in range(3)}, tmp_path, messages)
    assert [value for value, _ in results.values()] == [0, 2, 4] and list(results) == [0, 1, 2]
    assert len({os.getpid(), *[process for _, process in results.values()]}) == 4
    assert sorted(messages) == ["doubling 0", "doubling 1", "doubling 2"]


def test_they_compute_with_threads_where_this_process_has_done_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.ones(512, 512)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = (large @ large).exp2().sum().item()  # libgomp has started its threads here
        results = answers({number: lambda tell: (large @ large).exp2().sum().item() for number in range(2)}, tmp_path)
    finally:
        torch.set_num_threads(before)
    assert results == {0: expected, 1: expected}


def refuse(tell: Tell) -> None:
    raise BuildError("not-standalone", "no sort", "use torch")


def start(folder: Path, tell: Tell) -> None:
    process = subprocess.Popen(["sleep", "600"], process_group=0)
    (folder / "pids").write_text(f"{process.pid} {os.getpid()}")
    process.wait()


def refuse_later(folder: Path, tell: Tell) -> None:
    while not (folder / "pids").exists() or not (folder / "pids").read_text():
        time.sleep(0.01)
    refuse(tell)


def test_the_first_refusal_ends_all_and_what_they_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "processors", lambda: 2)
    with raises("not-standalone", match="no sort"):
        answers({0: partial(start, tmp_path), 1: partial(refuse_later, tmp_path)}, tmp_path)
    assert not [process for process in (tmp_path / "pids").read_text().split() if runs(process)]


def runs(process: str) -> bool:
    """Tells whether it still runs; a zombie has ended but was not waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_death_is_told_with_its_signal_and_an_error_with_its_last_line(tmp_path: Path) -> None:
    with raises("worker-died", match="was killed by SIGKILL: it wrote nothing"):
        answers({0: lambda tell: os.kill(os.getpid(), signal.SIGKILL)}, tmp_path)
    with raises("worker-died", match="ended without an answer: ZeroDivisionError: integer division"):
        answers({0: lambda tell: 1 // 0}, tmp_path)
