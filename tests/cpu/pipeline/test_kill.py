"""A build that is killed at any stage leaves no bundle; the next build succeeds and cleans up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cgbundle
import cgcompile
from tests.helpers.bundles.tiny_bundle import HOST_FILE
from tests.helpers.places import ROOT

BUILDS = """
import json, os, shutil, signal, sys
import cgcompile, cgcompile.pipeline.build, torch.export
from cgcompile.targets.cpu import aoti, object_cache
from cgcompile.targets.kernels import standalone

def build(model, out, stage, state, code):
    def compiled(program, work, *rest):
        shutil.copyfile(code, work / "model.so")
        return aoti.Compiled(path=work / "model.so", features=(), standalone=standalone.is_in((work / "model.so").read_bytes()))

    def watch(event):
        if (event.stage, event.state) == (stage, state):
            os.kill(os.getpid(), signal.SIGKILL)

    object_cache.compile_cpu = compiled
    os.environ["CGCOMPILE_CACHE"] = os.path.dirname(out) + "-cache"
    cgcompile.build(model, sizes=[1, 4], out=out, target="cpu", force=True, progress=watch)

for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            build(*json.loads(line))
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A process that forks for every build, so that torch is imported once. Compiling takes ten seconds, so a compiled bundle of the
same model replaces it."""

MOMENTS = [(stage, "start") for stage in ("source", "export", "check", "padding", "lower", "emit", "verify")] + [("verify", "done")]


Kill = Callable[[Path, str, str], None]
"""Starts a build to a path, and kills it in this state of that stage."""


@pytest.fixture(scope="module")
def killed(model_file: Path, bundle: Path) -> Iterator[Kill]:
    path = ":".join(str(ROOT / part) for part in (".", "bundles"))
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", BUILDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "CXX": "false"},
    ) as builds:  # fmt: skip

        def kill(out: Path, stage: str, state: str) -> None:
            assert builds.stdin and builds.stdout
            builds.stdin.write(json.dumps([str(model_file), str(out), stage, state, str(bundle / HOST_FILE)]) + "\n")
            builds.stdin.flush()
            assert int(builds.stdout.readline()) == -signal.SIGKILL

        yield kill


@pytest.mark.parametrize(("stage", "state"), MOMENTS, ids=[f"{stage}-{state}" for stage, state in MOMENTS])
def test_a_killed_build_leaves_no_bundle(killed: Kill, tmp_path: Path, stage: str, state: str) -> None:
    out = tmp_path / "tiny.cgb"
    killed(out, stage, state)
    assert not out.exists()
    assert all(path.name.startswith(".tiny.cgb.") for path in tmp_path.iterdir()), "a staging folder, and a lock that ended"


def test_the_next_build_succeeds_and_sweeps_up(killed: Kill, model_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny.cgb"
    killed(out, "emit", "done")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".building", ".lock"]
    cgcompile.build(str(model_file), sizes=[1, 4], out=out, target="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.cgb"]


def test_a_killed_replacement_leaves_the_old_bundle(killed: Kill, bundle: Path, tmp_path: Path) -> None:
    import shutil

    out = tmp_path / "tiny.cgb"
    shutil.copytree(bundle, out)
    killed(out, "verify", "start")
    with cgbundle.load(out, check="full") as program:
        assert program.int_keys == ((1,), (4,))
