"""A build that is killed at any stage leaves no bundle, and the next build succeeds and cleans up."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cgbundle
import cgcompile
from tests.helpers.places import ROOT
from tests.helpers.support import HOST_FILE

BUILD = """
import os, shutil, signal, sys
import cgcompile
from cgcompile.targets.cpu import aoti, object_cache

def compiled(program, work, *rest):
    shutil.copyfile(sys.argv[5], work / "model.so")
    return aoti.Compiled(path=work / "model.so", features=())

object_cache.compile_cpu = compiled

def watch(event):
    if (event.stage, event.state) == (sys.argv[3], sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

cgcompile.build(sys.argv[1], sizes=[1, 4], out=sys.argv[2], target="cpu", force=True, progress=watch)
"""
"""In the place of the compiler, which takes ten seconds, stands what it made for `bundle`, a bundle of the same model."""

MOMENTS = [(stage, "start") for stage in ("source", "export", "check", "padding", "lower", "emit", "verify")] + [("verify", "done")]


def killed(model: Path, bundle: Path, out: Path, stage: str, state: str) -> None:
    path = ":".join(str(ROOT / part) for part in (".", "bundles"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD, str(model), str(out), stage, state, str(bundle / HOST_FILE)],
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "CGCOMPILE_CACHE": f"{out.parent}-cache", "CXX": "false"}, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("stage", "state"), MOMENTS, ids=[f"{stage}-{state}" for stage, state in MOMENTS])
def test_a_killed_build_leaves_no_bundle(model_file: Path, bundle: Path, tmp_path: Path, stage: str, state: str) -> None:
    out = tmp_path / "tiny.cgb"
    killed(model_file, bundle, out, stage, state)
    assert not out.exists()
    assert all(path.name.startswith(".tiny.cgb.") for path in tmp_path.iterdir()), "a staging folder, and a lock that ended"


def test_the_next_build_succeeds_and_sweeps_up(model_file: Path, bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny.cgb"
    killed(model_file, bundle, out, "emit", "done")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".building", ".lock"]
    cgcompile.build(str(model_file), sizes=[1, 4], out=out, target="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.cgb"]


def test_a_killed_replacement_leaves_the_old_bundle(model_file: Path, bundle: Path, tmp_path: Path) -> None:
    import shutil

    out = tmp_path / "tiny.cgb"
    shutil.copytree(bundle, out)
    killed(model_file, bundle, out, "verify", "start")
    with cgbundle.load(out, check="full") as program:
        assert program.int_keys == ((1,), (4,))
