"""Checks the output path before the build, and turns errors of the file system into a BuildError with this path."""

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
"""Errors of a hard link: no support in the file system, too many links, another user's file under fs.protected_hardlinks."""


def destination_path(out: str | os.PathLike[str] | None, name: str) -> Path:
    """Returns the bundle's path, by default the model's name + `.cgb`.  Raises output-unwritable."""
    path = Path(out) if out is not None else Path(f"{name}.cgb")
    if path.exists() and not _replaceable(path):
        raise BuildError("output-unwritable", f"{path}: exists and is not a bundle", OTHER_NAME)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise BuildError("output-unwritable", f"{path}: the folder {folder} does not exist")
    return path


def _replaceable(path: Path) -> bool:
    """Whether `path` is a bundle or an empty folder."""
    from cgbundle.format import file_names  # late: the path rarely exists, and the check of a mistyped name should stay fast

    return path.is_dir() and ((path / file_names.MANIFEST).exists() or not any(path.iterdir()))


def check_free(path: Path, force: bool) -> None:
    """Raises output-exists if `path` exists and `force` is False, and output-unwritable if its folder cannot be written."""
    if not force and os.path.lexists(path):
        raise _refusal(path, FileExistsError())
    folder = path.absolute().parent
    if not os.access(folder, os.W_OK):
        raise BuildError("output-unwritable", f"{path}: the folder {folder} cannot be written")


@contextmanager
def staged_bundle(path: Path, force: bool) -> Iterator[Path]:
    """Yields the folder of `staged` for a build.  Raises output-exists and output-busy at the start, and output-exists at the end
    if the path was created meanwhile.  Raises disk-full and output-unwritable for errors of the folder or its files."""
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
            raise  # for example, an error of one of the model's files
        with _destination_errors(path):
            stack.close()


def link(file: Path, place: Path) -> None:
    """Creates a hard link, or a copy if no hard link is possible.  Raises FileExistsError."""
    try:
        os.link(file, place)
    except OSError as error:
        if error.errno not in UNLINKABLE:
            raise
        part_file = place.with_name(f".{uuid4().hex}.part")
        shutil.copy(file, part_file)  # unlike a link, a copy takes disk space
        part_file.rename(place)


@contextmanager
def _destination_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _refusal(path, error) from error


def _refusal(path: Path, error: OSError) -> BuildError:
    """Returns the BuildError for an error of the operating system.  `path`: the bundle."""
    if isinstance(error, BlockingIOError):
        return BuildError("output-busy", f"{path}: another process is building this bundle")
    if isinstance(error, FileExistsError):
        return BuildError("output-exists", f"{path}: exists", f"give --force to replace it, or {OTHER_NAME}")
    folder = path.absolute().parent
    if error.errno in FULL:
        return disk_full(folder, OUTPUT)
    return BuildError("output-unwritable", f"{path}: the folder {folder} cannot be written: {error.strerror}")
