"""A process that imports modules once, and is then forked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cgcompile.util.fork_server import ForkServer

WORKER = "tests.helpers.forked_worker"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    running = ForkServer(WORKER, {}, tmp_path / "server.log")
    yield running
    running.close()


def ended(number: int) -> bool:
    """Returns whether a process is gone, or has ended and waits for its parent."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def test_processes_share_what_was_imported_and_answer_for_themselves(server: ForkServer, tmp_path: Path) -> None:
    first, second = [server.fork("echo", tmp_path / f"{name}.log") for name in "ab"]
    seen = []
    for process, line in ((second, "two"), (first, "one"), (first, "again")):
        process.requests.write(f"{line}\n")
        process.requests.flush()
        text, imported_by, number, group = process.answers.readline().split()
        assert text == line and number == group and number != imported_by
        seen.append((imported_by, number))
    assert seen[0][0] == seen[1][0] and seen[0][1] != seen[1][1] == seen[2][1]
    assert (tmp_path / "a.log").read_text() == "log of echo\n"
    first.end()
    second.requests.close()
    assert second.wait() == 0 and ended(int(seen[1][1]))


def test_a_process_has_the_environment_of_the_time_when_it_is_asked_for(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("first", None):
        monkeypatch.setenv("LATER", value) if value else monkeypatch.delenv("LATER")
        process = server.fork("variable LATER", tmp_path / "log")
        assert process.answers.readline() == f"{value or 'none'}\n"
        process.end()


@pytest.mark.parametrize(("argument", "status", "last"), [("raise", 1, "ValueError: bad input"), ("signal", -11, "log of signal")])
def test_how_a_process_ended_is_told(server: ForkServer, tmp_path: Path, argument: str, status: int, last: str) -> None:
    process = server.fork(argument, tmp_path / "log")
    assert process.answers.readline() == ""
    assert process.wait() == status
    log = (tmp_path / "log").read_text()
    assert last in log and (argument == "signal" or log.splitlines()[-1] == last)


def test_what_a_process_has_started_ends_with_it(server: ForkServer, tmp_path: Path) -> None:
    process = server.fork("children", tmp_path / "log")
    child = int(process.answers.readline())
    process.end()
    process.end()
    assert ended(child)


def test_processes_end_with_the_server(server: ForkServer, tmp_path: Path) -> None:
    process = server.fork("echo", tmp_path / "log")
    process.requests.write("hello\n")
    process.requests.flush()
    number = int(process.answers.readline().split()[2])
    server.close()
    assert ended(number)


def test_a_server_that_cannot_import_says_so(tmp_path: Path) -> None:
    running = ForkServer("tests.helpers.not_there", {}, tmp_path / "server.log")
    process = running.fork("echo", tmp_path / "log")
    assert process.answers.readline() == ""
    assert process.wait() is None
    assert "No module named 'tests.helpers.not_there'" in (tmp_path / "server.log").read_text()
    process.end()
    running.close()


def test_processes_end_with_the_build_when_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cgcompile.util.fork_server import ForkServer;"
        f"server = ForkServer({WORKER!r}, {{}}, Path(sys.argv[1]) / 'server.log');"
        "process = server.fork('echo', Path(sys.argv[1]) / 'log');"
        "process.requests.write('hello\\n'); process.requests.flush();"
        "print(process.answers.readline(), flush=True); sys.stdin.read()"
    )
    build = subprocess.Popen(
        [sys.executable, "-c", code, os.fspath(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert build.stdout is not None
    _, server, number, _ = build.stdout.readline().split()
    build.kill()
    build.communicate()
    assert ended(int(server)) and ended(int(number))
