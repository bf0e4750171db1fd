"""After SIGTERM or SIGHUP a command prints a line, exits with the signal's status, removes partial files and ends its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cgcompile_cli.signals import NAMES, descendants
from tests.helpers.places import ROOT

COMMAND = """
import os, signal, subprocess, sys, time
from pathlib import Path
from cgcompile_cli import errors, main, signals

mode, folder = sys.argv[1], Path(sys.argv[2])
if mode == "twice":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have it ignored, as nohup does

def work():
    child = subprocess.Popen([sys.executable, "-S", "-c", "import subprocess; subprocess.run(['sleep', '600'])"])
    while len(signals.descendants(os.getpid())) < 2:
        time.sleep(0.01)
    (folder / "half").touch()
    if mode == "forked" and os.fork() == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        print("ready", flush=True)
        time.sleep(600)
    finally:
        if mode == "twice":
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
        child.wait()
        time.sleep(0.1)
        (folder / "half").unlink()

def app(prog_name):
    try:
        with errors.as_text([]):
            work()
    except main.typer.Exit as done:
        sys.exit(done.exit_code)

main.app = app
main.main()
"""


def started(mode: str, folder: Path, *before: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(str(ROOT / part) for part in (".", "cli", "bundles"))
    process = subprocess.Popen(
        [*before, sys.executable, "-c", COMMAND, mode, str(folder)], env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()
    return process


@pytest.mark.parametrize(
    ("mode", "number"),
    [("once", signal.SIGTERM), ("twice", signal.SIGHUP), ("forked", signal.SIGTERM)],
    ids=["TERM", "HUP", "forked"],
)
def test_a_command_ends_as_on_an_interrupt(tmp_path: Path, mode: str, number: signal.Signals) -> None:
    """Further signals do not interrupt the removal. A forked process that gets a signal leaves its parent's files alone."""
    with started(mode, tmp_path) as process:
        children = descendants(process.pid)
        assert len(children) >= 2 and process.poll() is None
        process.send_signal(number)
        _, stderr = process.communicate(timeout=300)
    assert (process.returncode, stderr) == (128 + number, f"error: {NAMES[number]}\n")
    assert os.listdir(tmp_path) == []
    until = time.monotonic() + 60
    while left := [child for child in children if Path(f"/proc/{child}/cwd").exists()]:
        assert time.monotonic() < until, left  # a process takes a moment to end
        time.sleep(0.01)


def test_a_signal_that_was_ignored_stays_so(tmp_path: Path) -> None:
    with started("once", tmp_path, "nohup") as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert process.poll() is None and os.listdir(tmp_path) == ["half"]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    assert process.returncode == 143 and os.listdir(tmp_path) == []


def test_nobody_elses_processes_are_told() -> None:
    with subprocess.Popen(["sleep", "600"]) as ours:
        assert ours.pid in descendants(os.getpid())
        assert ours.pid not in descendants(ours.pid) and os.getpid() not in descendants(os.getpid())
        ours.kill()
