"""Workers return answers, and errors with their code; a worker that dies is an error. A worker takes one request or several."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cgcompile.errors import CATALOGUE
from cgcompile.util.workers import Kind, Request, ask
from tests.helpers.places import ROOT
from tests.helpers.raising import raises

WORKER = """
    import os
    import subprocess
    import time
    from cgcompile.errors import BuildError, ModelError
    from cgcompile.util.workers import serve

    def work(request):
        if request == "refuse":
            raise BuildError("function-not-interpretable", "no erfc", "use erf")
        if request == "refuse plainly":
            raise ModelError("sizes-invalid", "0 is no size")
        if request == "die":
            raise RuntimeError("out of luck")
        if request == "hang":
            time.sleep(600)
        if request == "compile":
            subprocess.run(["sleep", "600"])
        if request == "who":
            return os.getpid()
        if request == "environment":
            return dict(os.environ)
        print("chatter")
        return {"twice": 2 * request}

    if __name__ == "__main__":
        serve(work)
"""


@pytest.fixture
def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    (tmp_path / "asked_worker.py").write_text(textwrap.dedent(WORKER))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return {"module": "asked_worker", "folder": tmp_path, "died": "worker-died"}


def asked(kind: Mapping[str, Any], *contents: object, workers: int = 1, **changes: Any) -> list[Any]:
    requests = {number: Request(content=content, what="doing it") for number, content in enumerate(contents)}
    answers = dict(ask(Kind(**kind, **changes), requests, workers))
    return [answers[number] for number in range(len(contents))]


def test_answers(kind: Mapping[str, Any]) -> None:
    assert asked(kind) == []
    assert asked(kind, 21, 4, 5, workers=2) == [{"twice": 42}, {"twice": 8}, {"twice": 10}]


def test_a_worker_takes_several_requests_or_one(kind: Mapping[str, Any]) -> None:
    assert len(set(asked(kind, *["who"] * 3))) == 1
    assert len(set(asked(kind, *["who"] * 3, reused=False))) == 3


def test_environment(kind: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_SETTING", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (variables,) = asked(kind, "environment", environment={"MORE": "x"}, hidden=lambda name: name.startswith("SECRET"))
    assert (variables["MORE"], variables["CUDA_VISIBLE_DEVICES"], "SECRET_SETTING" in variables) == ("x", "", False)


@pytest.mark.parametrize(
    ("request_", "code", "message", "hint"),
    [
        ("refuse", "function-not-interpretable", "no erfc", "use erf"),
        ("refuse plainly", "sizes-invalid", "0 is no size", CATALOGUE["sizes-invalid"].hint),
    ],
)
def test_a_refusal_keeps_its_code_and_hint(request_: str, code: str, message: str, hint: str, kind: Mapping[str, Any]) -> None:
    with raises(code, match=message) as caught:
        asked(kind, request_)
    assert getattr(caught.value, "hint", "") == hint


def test_whatever_else_ends_it_is_its_death(kind: Mapping[str, Any]) -> None:
    with raises("worker-died", match="doing it: the process ended with status 1: .*out of luck"):
        asked(kind, "die")


def test_there_are_as_many_workers_as_processors_may_be_used(kind: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container or under taskset, fewer processors may be used than the machine has."""
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    answers = ask(Kind(**kind), {number: Request(content="who", what="doing it") for number in range(3)})
    assert len({process for _, process in answers}) == 1


def test_the_first_error_ends_the_others(kind: Mapping[str, Any]) -> None:
    began = time.monotonic()
    with raises("sizes-invalid"):
        asked(kind, "hang", "refuse plainly", 1, workers=2)
    assert time.monotonic() - began < 300


# --- what is left ----------------------------------------------------------------------------------------------------


def running(folder: Path) -> list[str]:
    """Returns the command lines of processes that a test of this folder started."""
    command_lines = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cwd").resolve() == folder and (path / "cmdline").read_text():
                command_lines.append((path / "cmdline").read_text())
        except OSError:  # the process has ended
            pass
    return command_lines


def wait_until(what: str, folder: Path, *, seconds: float = 60) -> bool:
    """Waits for a process whose command line contains `what`, or with "" until none is left. Returns whether it happened."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        commands = running(folder)
        if any(what in command for command in commands) if what else not commands:
            return True
        time.sleep(0.02)
    return False


PROC = pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs /proc")


@PROC
def test_what_a_worker_started_ends_with_it(kind: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one worker fails, the others are ended, and a compiler that they have started."""
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **more: popen(*arguments, **{"cwd": tmp_path, **more}))
    answers = ask(Kind(**kind), {name: Request(content=name, what="doing it") for name in ("compile", "who")}, 2)
    assert next(answers)[0] == "who" and wait_until("sleep", tmp_path)
    answers.close()  # type: ignore[attr-defined]
    assert wait_until("", tmp_path, seconds=60)


PARENT = """
import sys
from pathlib import Path
from cgcompile.util.workers import Kind, Request, ask
sys.path.append(sys.argv[1])
kind = Kind(module="asked_worker", folder=Path(sys.argv[1]), died="worker-died")
list(ask(kind, {0: Request(content="hang", what="doing it")}))
"""


@PROC
@pytest.mark.parametrize("delay", [0.0, 1.0], ids=["at its start", "at work"])
def test_a_worker_ends_with_a_parent_that_is_killed(kind: Mapping[str, Any], tmp_path: Path, delay: float) -> None:
    path = f"{ROOT}:{ROOT / 'bundles'}"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    assert wait_until("asked_worker", tmp_path)
    time.sleep(delay)
    parent.kill()
    assert parent.wait() == -signal.SIGKILL
    assert wait_until("", tmp_path, seconds=60)


def test_a_worker_that_starts_while_the_others_are_ended_is_not_waited_for(
    kind: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    popen, calls = subprocess.Popen, 0

    def late(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            time.sleep(1)  # until the first worker has failed
        return popen(*arguments, **more)

    monkeypatch.setattr(subprocess, "Popen", late)
    requests = {name: Request(content=name, what="doing it") for name in ("refuse", "hang")}
    began = time.monotonic()
    with raises("function-not-interpretable"):
        for _ in ask(Kind(**kind), requests, 2):
            pass
    assert time.monotonic() - began < 300


def test_when_the_time_is_over_the_needed_answers_alone_are_waited_for(kind: Mapping[str, Any]) -> None:
    requests = {name: Request(content=content, what="doing it") for name, content in (("slow", "hang"), ("needed", 4))}
    began = time.monotonic()
    assert dict(ask(Kind(**kind), requests, 2, 0.0, ["needed"])) == {"needed": {"twice": 8}}
    assert dict(ask(Kind(**kind), requests, 2, 10.0)) == {"needed": {"twice": 8}}
    assert time.monotonic() - began < 300, "who hangs was not waited for"
