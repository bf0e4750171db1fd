"""A build that receives a termination signal ends as after Ctrl-C: it prints one line, and leaves no files and no processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.places import ROOT

pytest.importorskip("torch")

MODEL = """
import subprocess
import sys
from pathlib import Path

import torch

# what a build has running: a stage beside the output, temporary files, and a driver that waits for a compiler
CODE = "import subprocess; subprocess.run(['sleep', '600'])"


def model():
    return torch.nn.Linear(2, 2)


def inputs(batch):
    from cgcompile.util.scratch import scratch_folder

    if not list(Path("out").glob(".*.building")):
        return (torch.ones(batch, 2),)  # the build has not begun
    with scratch_folder() as folder:
        (folder / "half").touch()
        subprocess.run([sys.executable, "-c", CODE + f"; open({str(folder / 'said')!r}, 'w')"])
"""


def running(folder: Path) -> list[str]:
    """Returns the command lines of processes that run in a folder."""
    command_lines = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cwd").resolve() == folder:
                command_lines.append((path / "cmdline").read_text().replace("\0", " "))
        except OSError:  # the process has ended
            pass
    return command_lines


def wait_for(what: str, folder: Path) -> None:
    end = time.monotonic() + 300
    while not any(what in command for command in running(folder)):
        assert time.monotonic() < end, "it does not begin"
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs /proc")
def test_a_build_that_is_told_to_end(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "m.py").write_text(MODEL)
    path = os.pathsep.join(str(ROOT / part) for part in (".", "cli", "bundles"))
    process = subprocess.Popen(
        [sys.executable, "-m", "cgcompile_cli", "build", "m.py", "--sizes", "1,2", "--target", "cpu", "-o", "out/m.cgb", "--quiet"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path / "tmp")}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for("sleep 600", tmp_path)
        assert [path.suffix for path in sorted((tmp_path / "out").iterdir())] == [".building", ".lock"]
        process.send_signal(signal.SIGTERM)
        error_text = process.communicate(timeout=300)[1]
    finally:
        process.kill()
    assert (process.returncode, error_text) == (143, "error: terminated\n")
    assert os.listdir(tmp_path / "out") == [] and not list((tmp_path / "tmp").glob("cgcompile-*"))
    assert running(tmp_path) == []
