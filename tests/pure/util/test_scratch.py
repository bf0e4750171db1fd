"""The temporary folder of a build is removed, even if a process still writes to it. The next build removes the folder of a killed
build."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from cgcompile.util import scratch


def test_the_folder_is_new_and_goes() -> None:
    with scratch.scratch_folder() as folder:
        (folder / "a").mkdir()
        (folder / "a" / "b").write_text("c")
    assert not folder.exists()


@pytest.mark.parametrize("writes", [3, 1000], ids=["a worker that ends", "one that does not"])
def test_a_worker_that_still_writes_is_waited_for_and_no_error(monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """The worker writes again after each removal."""
    ends = writes == 3
    monkeypatch.setattr(scratch, "PATIENCE", 60.0 if ends else 0.3)
    remove, removals = shutil.rmtree, 0

    def rmtree(path: Path, ignore_errors: bool) -> None:
        nonlocal removals
        remove(path, ignore_errors)
        removals += 1
        if removals <= writes:
            (path / "record").mkdir(parents=True)

    with monkeypatch.context() as patch:
        patch.setattr(scratch.shutil, "rmtree", rmtree)
        with scratch.scratch_folder() as folder:
            pass
    assert removals == 4 if ends else removals > 1
    assert folder.exists() != ends
    shutil.rmtree(folder, ignore_errors=True)


def test_the_folder_goes_when_the_build_fails() -> None:
    with pytest.raises(ValueError, match="why"), scratch.scratch_folder() as folder:
        raise ValueError("why")
    assert not folder.exists()


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder for scratch folders, here and in started processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def old(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_bytes(b"large")
    before = time.time() - 2 * scratch.YOUNG
    os.utime(folder, (before, before))
    return folder


HOLD = """
import sys, time
from cgcompile.util.scratch import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_left_goes_with_the_next_build(parent: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = old(Path(process.stdout.readline().strip()))
        with scratch.scratch_folder():
            assert left.exists()  # the process still runs
        process.send_signal(signal.SIGKILL)
    with scratch.scratch_folder() as folder:
        assert list(parent.iterdir()) == [folder]


def test_a_young_folder_may_not_have_its_lock_yet(parent: Path) -> None:
    (parent / f"{scratch.PREFIX}a").mkdir()
    with scratch.scratch_folder():
        pass
    assert len(list(parent.iterdir())) == 1


def test_what_is_no_folder_of_ours_stays(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = old(parent / "theirs")
    (parent / f"{scratch.PREFIX}link").symlink_to(theirs, target_is_directory=True)
    (parent / f"{scratch.PREFIX}file").write_text("a")
    os.utime(parent / f"{scratch.PREFIX}file", (0, 0))
    os.utime(parent / f"{scratch.PREFIX}link", (0, 0), follow_symlinks=False)
    other = old(parent / f"{scratch.PREFIX}other")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: other.stat().st_uid + 1)
        with scratch.scratch_folder():
            pass
    assert len(list(parent.iterdir())) == 4 and (theirs / "weights").exists()
    with scratch.scratch_folder():
        pass
    assert len(list(parent.iterdir())) == 3 and (theirs / "weights").exists()


def test_where_there_are_no_locks_nothing_is_removed(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = old(parent / f"{scratch.PREFIX}a")

    def flock(handle: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(scratch.fcntl, "flock", flock)
    with scratch.scratch_folder() as folder:
        assert folder.exists() and left.exists()
    assert not folder.exists()


def test_one_that_cannot_be_opened_keeps_no_other(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [old(parent / f"{scratch.PREFIX}{name}") for name in "abc"]
    usual = os.open

    def refuse(path: Any, *rest: Any, **named: Any) -> int:
        if path == left[1]:
            raise PermissionError(13, "Permission denied")
        return usual(path, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(scratch.os, "open", refuse)
        scratch._remove_leftovers(parent)
    assert list(parent.iterdir()) == [left[1]]
