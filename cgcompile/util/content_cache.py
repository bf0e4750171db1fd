"""A cache of results between builds: a folder of files, each named by the hash of everything that its result depends on.

A file contains MAGIC, the length and the SHA-256 of the data, and the data.  The data is a record of `record_codec`, not a pickle.
The hash also covers the file's name.  Results become part of bundles, so folders and files must belong to the user, and no other
user may have write permission.  Files that break this rule, and damaged files, count as missing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import cgbundle

from ..errors import BuildError
from .disk_space import CACHE, FULL, disk_full
from .record_codec import decode, encode

Record = TypeVar("Record")

MAGIC = b"cgcache\x01"
HEAD = len(MAGIC) + 8 + 32

PACKAGES = (Path(__file__).parents[1], Path(cgbundle.__file__).parent)

LIBRARIES = ("torch", "triton", "numpy")
"""Packages whose version can change a result, in addition to this code and Python."""

SETTINGS = re.compile(r"(TORCH|PYTORCH|TRITON|MLIR|LLVM|NVPTX|PTXAS|DISABLE_PTXAS|AMDGCN|USE_IR_LOC|CUDA|CUBLAS|CUDNN|NVIDIA_TF32)")
"""Prefixes of environment variables that change the results of torch and Triton."""

FOLDERS = re.compile(r"\w+_CACHE_(DIR|PATH)")
"""Variables that name a cache folder and do not change results."""


def cache_place() -> Path:
    """Returns the cache folder: CGCOMPILE_CACHE, else cgcompile in XDG_CACHE_HOME or ~/.cache.  It may not exist."""
    setting = os.environ.get("CGCOMPILE_CACHE")
    return Path(setting) if setting else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cgcompile"


def cache_folder() -> Path:
    """Returns the cache folder, and creates it if necessary.  Raises cache-unsafe if other users can write to it, and
    cache-unwritable."""
    folder = cache_place()
    with _cache_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()  # the user may link to another folder; the target is checked
        os.close(_opened(folder))
    return folder


@contextmanager
def cache_optional() -> Iterator[None]:
    """Ignores cache-unwritable and disk-full: a build continues without a cache."""
    try:
        yield
    except BuildError as error:
        if error.code not in ("cache-unwritable", "disk-full"):
            raise


def cache_path(folder: Path, stage: str, *parts: object) -> Path:
    """Returns the path of the file with a stage's result.  The name depends on `parts`, the code of compiler and runtime, the
    versions of Python and LIBRARIES, the machine type, and the environment's SETTINGS."""
    versions = [_version(package) for package in LIBRARIES]
    return folder / stage / digest(*parts, sys.version, platform.machine(), versions, settings(os.environ), _sources())


def settings(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the environment variables that change results, sorted."""
    return sorted((name, value) for name, value in environment.items() if SETTINGS.match(name) and not FOLDERS.fullmatch(name))


def digest(*parts: object) -> str:
    """Returns the SHA-256 of all parts: of the contents of bytes, and of the `repr` of other values."""
    sha = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        sha.update(b"bytes" if isinstance(part, bytes) else b"value")
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()


def sources(folders: Iterable[Path]) -> str:
    """Returns a hash of the names and contents of all Python files in the folders."""
    return digest(
        *(part for folder in folders for path in sorted(folder.rglob("*.py"))
          for part in (path.relative_to(folder).as_posix(), path.read_bytes()))
    )  # fmt: skip


@cache
def _sources() -> str:
    return sources(PACKAGES)


def recall(path: Path, kind: type[Record]) -> Record | None:
    """Returns the record that `remember` wrote, or None if it is missing or invalid.  Raises cache-unsafe if other users can write
    to its folder."""
    try:
        folder = _opened(path.parent)
    except FileNotFoundError:
        return None
    try:
        data = _contents(path.name, folder)
    except OSError:  # missing, a link, or a file of another user
        return None
    finally:
        os.close(folder)
    if data[len(MAGIC) : HEAD] != _head(path, data[HEAD:]):
        return None
    try:
        return decode(kind, data[HEAD:])
    except ValueError:
        return None


def remember(path: Path, record: object) -> None:
    """Writes a record of dataclasses atomically: another process sees all of it or nothing.  Raises cache-unsafe, cache-unwritable
    and disk-full, and TypeError for a value that `record_codec` does not support."""
    data = encode(record)
    with _cache_errors(path.parent):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(_opened(path.parent))
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=BEGUN)  # mode 0600
        try:
            with open(handle, "wb") as file:
                file.write(MAGIC + _head(path, data) + data)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            os.replace(name, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The number and size of the files of a stage."""

    stage: str
    files: int
    bytes: int


def kept() -> tuple[Kept, ...]:
    """Returns the counts of the cache's files by stage, () without a cache.  Counts only files of `remember`.  Raises
    cache-unsafe."""
    return _counted(lambda name, folder: None)


def remove_kept() -> tuple[Kept, ...]:
    """Removes the files of the cache, and returns their counts by stage.  Keeps files and folders of other users.  A running build
    computes removed results again.  Raises cache-unsafe, cache-unwritable."""
    with _cache_errors(cache_place()):
        removed = _counted(lambda name, folder: os.unlink(name, dir_fd=folder))
        for removed_stage in removed:
            with suppress(OSError):  # not empty
                os.rmdir(cache_place() / removed_stage.stage)
        with suppress(OSError):
            os.rmdir(cache_place())
        return removed


def _counted(action: Callable[[str, int], None]) -> tuple[Kept, ...]:
    """Calls `action` with the name of every cache file and the descriptor of its folder, and returns the counts by stage."""
    try:
        root = _opened(cache_place().resolve())
    except FileNotFoundError:
        return ()
    os.close(root)
    stages = []
    for stage_folder in sorted(path for path in cache_place().resolve().iterdir() if path.is_dir() and not path.is_symlink()):
        folder, files, size = _opened(stage_folder), 0, 0
        try:
            for name in os.listdir(folder):
                if (length := _cached_bytes(name, folder)) is not None:
                    action(name, folder)
                    files, size = files + 1, size + length
        finally:
            os.close(folder)
        stages += [Kept(stage=stage_folder.name, files=files, bytes=size)] if files else []
    return tuple(stages)


def _cached_bytes(name: str, folder: int) -> int | None:
    """Returns the size in bytes of a file that `remember` wrote or began to write, or None for any other file."""
    is_new = name.startswith(BEGUN)
    if not is_new and not re.fullmatch("[0-9a-f]{64}", name):
        return None
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        return status.st_size if is_ours and MAGIC.startswith(file.read(len(MAGIC)) or (MAGIC if is_new else b"-")) else None


BEGUN = ".new-"
"""Prefix of the names of incomplete files: a process writes them now, or was killed before it finished."""


def _head(path: Path, data: bytes) -> bytes:
    """Returns the length and the hash of a file's data.  The hash covers the name, so a renamed file is invalid."""
    name = f"{path.parent.name}/{path.name}".encode()
    return len(data).to_bytes(8, "little") + hashlib.sha256(name + b"\0" + data).digest()


def _opened(folder: Path) -> int:
    """Returns a descriptor of a folder of the cache.  Raises cache-unsafe if other users can write to it, and FileNotFoundError."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise BuildError("cache-unsafe", f"{folder}: the folder of compiled kernels is a link or a file") from None
        raise
    if not _private(os.fstat(handle)):
        os.close(handle)
        raise BuildError("cache-unsafe", f"{folder}: others can write to the folder of compiled kernels")
    return handle


def _contents(name: str, folder: int) -> bytes:
    """Reads a cache file in a folder.  Raises OSError if it is incomplete, or not a private file of the user."""
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or not _private(status):
            raise OSError(errno.EACCES, "not a file of the user's own", name)
        start = file.read(HEAD)
        size = int.from_bytes(start[len(MAGIC) : len(MAGIC) + 8], "little")
        if start[: len(MAGIC)] != MAGIC or status.st_size != HEAD + size:
            raise OSError(errno.EINVAL, "damaged", name)  # before `read`: a sparse file could be huge
        return start + file.read(size)


def _private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """Converts OSErrors of the code inside this context to errors about the cache."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise disk_full(folder, CACHE) from error
        raise BuildError("cache-unwritable", f"{folder}: the folder of compiled kernels: {error.strerror}") from error


@cache
def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # late import: `cgcompile doctor` needs only the folder's name

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
