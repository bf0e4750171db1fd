"""Writing a bundle so that it is whole or absent: staged beside its destination, synced, renamed into place."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def staged(destination: Path, *, replace: bool) -> Iterator[Path]:
    """A fresh directory beside `destination`, renamed to it when the block ends well and removed when it does not.

    A process that is killed leaves its staging directory, named after it, which the next build to this destination removes.  With
    `replace`, an existing bundle stays in place until the new one is whole.
    """
    _sweep(destination)
    stage = destination.parent / f".{destination.name}.{os.getpid()}.{uuid4().hex[:8]}.building"
    stage.mkdir(parents=True)
    try:
        yield stage
        for folder, _, names in os.walk(stage):
            for name in (*names, "."):
                _sync(Path(folder, name))
        if replace and destination.exists():
            old = stage.with_suffix(".old")
            destination.rename(old)
            try:
                stage.rename(destination)
            except OSError:
                old.rename(destination)
                raise
            _remove(old)
        else:
            stage.rename(destination)
        _sync(destination.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _sweep(destination: Path) -> None:
    if not destination.parent.is_dir():
        return
    ours = re.compile(rf"\.{re.escape(destination.name)}\.([0-9]{{1,9}})\.[0-9a-f]{{8}}\.(building|old)")
    for leftover in list(destination.parent.iterdir()):
        match = ours.fullmatch(leftover.name)
        if match is None or _alive(int(match[1])):
            continue
        if leftover.suffix == ".old" and not destination.exists():
            leftover.rename(destination)  # killed between the two renames: the old bundle is whole, put it back
        else:
            _remove(leftover)


def _remove(path: Path) -> None:
    """Whatever it is: `replace` may have moved a link or a plain file aside."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
