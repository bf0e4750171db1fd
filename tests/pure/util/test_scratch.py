"""The folder of a build goes, whoever still writes to it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cgcompile.util import scratch


def test_the_folder_is_new_and_goes() -> None:
    with scratch.scratch_folder() as folder:
        (folder / "a").mkdir()
        (folder / "a" / "b").write_text("c")
    assert not folder.exists()


@pytest.mark.parametrize("writes", [3, 1000], ids=["a worker that ends", "one that does not"])
def test_a_worker_that_still_writes_is_waited_for_and_no_error(monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """The worker writes again behind each removal."""
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
