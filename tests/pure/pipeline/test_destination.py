"""Problems with a bundle's destination are reported before any work, with the path that the user gave."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cgcompile.pipeline import destination
from cgcompile.pipeline.destination import destination_path, staged_bundle
from tests.helpers.places import ROOT
from tests.helpers.raising import raises


def never() -> None:
    pytest.fail("the work began")


def refuses(path: Path, code: str, *, force: bool = False, match: str | None = None) -> None:
    with raises(code, match=match), staged_bundle(path, force):
        never()


def test_a_bundle_goes_where_nothing_is(tmp_path: Path) -> None:
    with staged_bundle(tmp_path / "b.cgb", force=False) as folder:
        (folder / "manifest.json").write_text("1")
    assert (tmp_path / "b.cgb/manifest.json").read_text() == "1" and os.listdir(tmp_path) == ["b.cgb"]
    refuses(tmp_path / "b.cgb", "output-exists", match="b.cgb: exists")
    with staged_bundle(tmp_path / "b.cgb", force=True) as folder:
        (folder / "manifest.json").write_text("2")
    assert (tmp_path / "b.cgb/manifest.json").read_text() == "2" and os.listdir(tmp_path) == ["b.cgb"]


@pytest.mark.parametrize("force", [False, True])
def test_a_second_build_of_the_same_bundle(tmp_path: Path, force: bool) -> None:
    with staged_bundle(tmp_path / "b.cgb", force=False):
        refuses(tmp_path / "b.cgb", "output-busy", force=force, match="another process is building this bundle")


def test_what_came_while_it_was_built(tmp_path: Path) -> None:
    with raises("output-exists") as caught, staged_bundle(tmp_path / "b.cgb", force=False):
        (tmp_path / "b.cgb").mkdir()
    assert "--force" in getattr(caught.value, "hint", "") and os.listdir(tmp_path) == ["b.cgb"]


def test_names_that_no_bundle_can_have(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises("output-unwritable", match="exists and is not a bundle"):
        destination_path(tmp_path / "file", "b")
    with raises("output-unwritable", match="the folder .*missing does not exist"):
        destination_path(tmp_path / "missing" / "b.cgb", "b")
    assert destination_path(None, "model") == Path("model.cgb")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ENOSPC])
def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(path: Path, *rest: object, **options: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    refuses(tmp_path / "b.cgb", "disk-full" if code in destination.FULL else "output-unwritable", match=str(tmp_path))


def test_errors_of_the_work(tmp_path: Path) -> None:
    """A failure in the staging folder is reported with the path of the output. Other failures are raised unchanged."""
    path = tmp_path / "b.cgb"
    with raises("output-unwritable", match="b.cgb: .*File too large"), staged_bundle(path, force=False) as folder:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), "/tmp/model.so", None, str(folder / "model.so"))
    with raises("disk-full", match=str(tmp_path)), staged_bundle(path, force=False):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    with pytest.raises(FileNotFoundError, match="tokens.txt"), staged_bundle(path, force=False):
        raise FileNotFoundError(errno.ENOENT, "no such file", "tokens.txt")
    assert os.listdir(tmp_path) == []


FULL = """
import os, shutil, subprocess, sys
from pathlib import Path
from cgcompile.errors import BuildError
from cgcompile.pipeline.destination import staged_bundle
from cgcompile.util.scratch import scratch_folder

folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", folder], check=True)
try:
    with staged_bundle(folder / "b.cgb", force=False) as stage, scratch_folder() as scratch:
        (scratch / "model.so").write_bytes(bytes(1 << 20))
        if sys.argv[2] == "copy":
            shutil.copyfile(scratch / "model.so", stage / "model.so")
        else:
            (stage / "weights").write_bytes(bytes(1 << 20))
except BuildError as error:
    print(error.code, error, os.listdir(folder))
"""

ALONE = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*ALONE, "true"], check=False, capture_output=True).returncode != 0,
    reason="no namespaces to mount a small disk in",
)
@pytest.mark.parametrize("how", ["copy", "write"])
def test_a_disk_that_runs_full(tmp_path: Path, how: str) -> None:
    """The error of a copy first names the file that it reads, which is in the temporary folder."""
    done = subprocess.run(
        [*ALONE, sys.executable, "-c", FULL, str(tmp_path), how], env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'bundles'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == f"disk-full {tmp_path}: no space left for the bundle: 0 B free []\n", done.stderr
