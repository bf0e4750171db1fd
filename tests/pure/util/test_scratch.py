"""The folder of a build goes, whoever still writes to it."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time

import pytest

from cgcompile.util import scratch


def test_the_folder_is_new_and_goes() -> None:
    with scratch.scratch_folder() as folder:
        (folder / "a").mkdir()
        (folder / "a" / "b").write_text("c")
    assert not folder.exists()


@pytest.mark.parametrize("ends", [True, False], ids=["a worker that ends", "one that does not"])
def test_a_worker_that_still_writes_is_waited_for_and_no_error(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    monkeypatch.setattr(scratch, "PATIENCE", 60.0 if ends else 0.3)
    stop = threading.Event()

    def work() -> None:
        until = time.monotonic() + (0.3 if ends else 60)
        while not stop.is_set() and time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError, FileExistsError):  # removed between the two
                (folder / "record").mkdir(parents=True, exist_ok=True)
                (folder / "record" / "cache").touch()

    with scratch.scratch_folder() as folder:
        worker = threading.Thread(target=work)
        worker.start()
    gone = not folder.exists()
    stop.set()
    worker.join()
    shutil.rmtree(folder, ignore_errors=True)
    assert gone or not ends


def test_the_folder_goes_when_the_build_fails() -> None:
    with pytest.raises(ValueError, match="why"), scratch.scratch_folder() as folder:
        raise ValueError("why")
    assert not folder.exists()
