"""The error for a full disk names the folder that the user chose, whichever operation failed first."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from cgcompile.errors import BuildError, ModelError
from cgcompile.util import disk_space
from cgcompile.util.content_cache import remember
from cgcompile.util.disk_space import OUTPUT, SCRATCH, space_told
from cgcompile.util.scratch import scratch_folder
from tests.helpers.raising import raises
from tests.pure.util.test_content_cache import RESULT


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every disk report that it is full."""
    monkeypatch.setattr(disk_space, "_free", lambda folder: 0)


def no_space(*names: object) -> OSError:
    first, second = [*map(str, names), None, None][:2]
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), first, None, second)


def outcome(folder: Path, error: Exception) -> Exception:
    """Raises `error` in a block for a folder, and returns the error that leaves the block."""
    with pytest.raises(Exception) as caught, space_told(folder, OUTPUT):
        raise error
    return caught.value


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("make", [
    lambda folder: no_space(),
    lambda folder: no_space(folder / "weights"),
    lambda folder: no_space("/tmp/model.so", folder / "model.so"),
    lambda folder: RuntimeError("PytorchStreamWriter failed writing file"),
    lambda folder: BuildError("compiler-failed", "Inductor failed"),
], ids=["a write", "a file", "a copy", "torch", "a compiler"])  # fmt: skip
def test_the_folder_that_is_full_is_named(tmp_path: Path, make) -> None:
    error = outcome(tmp_path / "stage", make(tmp_path / "stage"))
    assert isinstance(error, BuildError) and error.code == "disk-full"
    assert str(error) == f"{tmp_path}: no space left for the bundle: 0 B free" and error.hint.endswith("-o")


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("error", [
    no_space("/elsewhere/file"),
    no_space("/elsewhere/from", "/elsewhere/to"),
    PermissionError(errno.EACCES, "denied"),
    ModelError("export-failed", "no"),
    BuildError("disk-full", "another folder"),
], ids=["another folder", "a copy", "permission", "the model", "told already"])  # fmt: skip
def test_other_errors_stay_as_they_are(tmp_path: Path, error: Exception) -> None:
    assert outcome(tmp_path, error) is error


def test_with_space_left_an_error_is_what_it_says(tmp_path: Path) -> None:
    for error in (RuntimeError("failed"), no_space("/elsewhere"), no_space()):
        assert outcome(tmp_path, error) is error


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_that_a_compiler_reports_is_believed(tmp_path: Path, code: int) -> None:
    """The compiler has removed its partial file, so the disk has space again."""
    error = BuildError("compiler-failed", "Inductor failed")
    error.__cause__ = RuntimeError(f"as: cannot write: {os.strerror(code)}")
    assert "too little, or a quota" in str(outcome(tmp_path, error))


def test_the_folder_of_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with raises("disk-full", match=f"^{tmp_path}: no space left for temporary files") as caught, scratch_folder() as folder:
        raise no_space(folder / "program.pt2")
    assert "TMPDIR" in getattr(caught.value, "hint", "") and os.listdir(tmp_path) == []
    with raises("disk-full", match=str(tmp_path)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", lambda **options: (_ for _ in ()).throw(no_space()))
        with scratch_folder():
            pytest.fail("there is no folder")


def test_no_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with raises("scratch-unwritable", match="missing") as caught, scratch_folder():
        pytest.fail("there is no folder")
    assert "TMPDIR" in getattr(caught.value, "hint", "")


def test_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(no_space(*names)))
    with raises("disk-full", match="no space left for compiled kernels") as caught:
        remember(tmp_path / "kernels" / "name", RESULT)
    assert "CGCOMPILE_CACHE" in getattr(caught.value, "hint", "") and os.listdir(tmp_path / "kernels") == []


def test_free_space_is_that_of_the_disk(tmp_path: Path) -> None:
    space = disk_space._free(tmp_path / "not" / "there")
    assert abs(space - shutil.disk_usage(tmp_path).free) < 1 << 34 and space > 0
    assert SCRATCH.other != OUTPUT.other


def test_errors_that_are_the_causes_of_each_other_end(tmp_path: Path) -> None:
    first, second = ValueError("first"), ValueError("second: No space left on device")
    first.__cause__, second.__cause__ = second, first
    with raises("disk-full"), space_told(tmp_path, OUTPUT):
        raise first
    second.args = ("second",)
    with pytest.raises(ValueError, match="first"), space_told(tmp_path, OUTPUT):
        raise first
