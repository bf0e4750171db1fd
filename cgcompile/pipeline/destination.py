"""Where a bundle goes: refused before minutes of work, not after, and in the terms of what the user chose."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

from ..bundle.publish import staged
from ..errors import BuildError
from ..util.disk_space import FULL, OUTPUT, disk_full, space_told

OTHER_NAME = "choose another name with -o"

UNLINKABLE = frozenset({errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES})
"""What a file system without hard links says, one whose file has too many, and a kernel that lets nobody link another user's."""


def destination_path(out: str | os.PathLike[str] | None, name: str) -> Path:
    """The path of a bundle, by default the model's name + `.cgb`.  Raises output-unwritable where none can be written."""
    path = Path(out) if out is not None else Path(f"{name}.cgb")
    if path.exists() and not _replaceable(path):
        raise BuildError("output-unwritable", f"{path}: exists and is not a bundle", OTHER_NAME)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise BuildError("output-unwritable", f"{path}: the folder {folder} does not exist")
    return path


def _replaceable(path: Path) -> bool:
    """Whether what is at `path` is a bundle or an empty folder."""
    from cgbundle.format import file_names  # late: seldom is anything there, and whoever mistypes a name is to know at once

    return path.is_dir() and ((path / file_names.MANIFEST).exists() or not any(path.iterdir()))


def check_free(path: Path, force: bool) -> None:
    """Raises output-exists for a path where something is that is not to be replaced, output-unwritable for its folder."""
    if not force and os.path.lexists(path):
        raise _refusal(path, FileExistsError())
    folder = path.absolute().parent
    if not os.access(folder, os.W_OK):
        raise BuildError("output-unwritable", f"{path}: the folder {folder} cannot be written")


@contextmanager
def staged_bundle(path: Path, force: bool) -> Iterator[Path]:
    """`staged` for the time of a whole build.  Raises output-exists and output-busy at once, or at the end for what came meanwhile;
    disk-full and output-unwritable for the folder and what is written to it."""
    with ExitStack() as stack:
        with _destination_errors(path):
            folder = stack.enter_context(staged(path, replace=force))
        try:
            with space_told(folder, OUTPUT):
                yield folder
        except OSError as error:
            written = error.filename2 or error.filename
            if error.errno in FULL or (isinstance(written, str) and Path(written).is_relative_to(folder)):
                raise _refusal(path, error) from error
            raise  # of a file of the model's, say
        with _destination_errors(path):
            stack.close()


def link(file: Path, place: Path) -> None:
    """A hard link, or a copy where there can be none.  Raises FileExistsError."""
    try:
        os.link(file, place)
    except OSError as error:
        if error.errno not in UNLINKABLE:
            raise
        part_file = place.with_name(f".{uuid4().hex}.part")
        shutil.copy(file, part_file)  # it takes its own space; all else holds
        part_file.rename(place)


@contextmanager
def _destination_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _refusal(path, error) from error


def _refusal(path: Path, error: OSError) -> BuildError:
    """What the system refused, of the bundle at `path`."""
    if isinstance(error, BlockingIOError):
        return BuildError("output-busy", f"{path}: another process is building this bundle")
    if isinstance(error, FileExistsError):
        return BuildError("output-exists", f"{path}: exists", f"give --force to replace it, or {OTHER_NAME}")
    folder = path.absolute().parent
    if error.errno in FULL:
        return disk_full(folder, OUTPUT)
    return BuildError("output-unwritable", f"{path}: the folder {folder} cannot be written: {error.strerror}")
