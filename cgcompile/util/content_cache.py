"""Results kept by content between builds: a folder of files named by the hash of all that a result depends on.

A file is MAGIC, the length and the SHA-256 of what follows, and a record (`record_codec`): no pickle.  The hash covers the file's
name, too.  Folders and files are the user's own, and nobody else can write to them: they become part of bundles.  A file that is
not so, or is damaged, counts as missing and is made again.
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
"""What makes the results, with this code and Python."""

SETTINGS = re.compile(r"(TORCH|PYTORCH|TRITON|MLIR|LLVM|NVPTX|PTXAS|DISABLE_PTXAS|AMDGCN|USE_IR_LOC|CUDA|CUBLAS|CUDNN|NVIDIA_TF32)")
"""Beginnings of environment variables that change what torch and Triton make."""

FOLDERS = re.compile(r"\w+_CACHE_(DIR|PATH)")
"""Variables that say where something is kept, not what it is."""


def cache_place() -> Path:
    """Where results are kept for the next build: CGCOMPILE_CACHE, else cgcompile in XDG_CACHE_HOME or ~/.cache.  It need not be
    there."""
    named = os.environ.get("CGCOMPILE_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cgcompile"


def cache_folder() -> Path:
    """`cache_place`, which is made where it is not there.  Raises cache-unsafe when it is not the user's own, and
    cache-unwritable."""
    folder = cache_place()
    with _cache_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()  # the user's own link may lead elsewhere; what it leads to is looked at
        os.close(_opened(folder))
    return folder


@contextmanager
def cache_optional() -> Iterator[None]:
    """Around what needs no cache: a build goes on where there can be none, or none can be written to."""
    try:
        yield
    except BuildError as error:
        if error.code not in ("cache-unwritable", "disk-full"):
            raise


def cache_path(folder: Path, stage: str, *parts: object) -> Path:
    """The file for what a stage makes of `parts`.  Its name also covers all code of the compiler and the runtime, the versions of
    Python and of LIBRARIES, the kind of machine, and the environment's SETTINGS."""
    versions = [_version(package) for package in LIBRARIES]
    return folder / stage / digest(*parts, sys.version, platform.machine(), versions, settings(os.environ), _sources())


def settings(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """The variables that change results, sorted."""
    return sorted((name, value) for name, value in environment.items() if SETTINGS.match(name) and not FOLDERS.fullmatch(name))


def digest(*parts: object) -> str:
    """The hash of values by their `repr`, of bytes as they are."""
    whole = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        whole.update(b"bytes" if isinstance(part, bytes) else b"value")
        whole.update(len(data).to_bytes(8, "little"))
        whole.update(data)
    return whole.hexdigest()


def sources(folders: Iterable[Path]) -> str:
    """The hash of the code in folders, and of the names of its files."""
    return digest(
        *(part for folder in folders for path in sorted(folder.rglob("*.py"))
          for part in (path.relative_to(folder).as_posix(), path.read_bytes()))
    )  # fmt: skip


@cache
def _sources() -> str:
    return sources(PACKAGES)


def recall(path: Path, kind: type[Record]) -> Record | None:
    """The record that `remember` wrote, or None when there is nothing, or something wrong.  Raises cache-unsafe when others can
    write to its folder."""
    try:
        folder = _opened(path.parent)
    except FileNotFoundError:
        return None
    try:
        data = _contents(path.name, folder)
    except OSError:  # nothing, a link, another's file: whatever it is, it is none of ours
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
    """Keeps a record of dataclasses; another process that asks meanwhile finds nothing or all of it.  Raises cache-unsafe,
    cache-unwritable and disk-full, and TypeError for what `record_codec` cannot hold."""
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
    """What is kept of a stage."""

    stage: str
    files: int
    bytes: int


def kept() -> tuple[Kept, ...]:
    """What is in the cache, by stage; () where there is none.  Files that are not ours do not count.  Raises cache-unsafe."""
    return _counted(lambda name, folder: None)


def remove_kept() -> tuple[Kept, ...]:
    """Removes what is in the cache, but no file or folder of another's; returns what `kept` did.  A build that runs meanwhile makes
    again what it misses.  Raises cache-unsafe, cache-unwritable."""
    with _cache_errors(cache_place()):
        removed = _counted(lambda name, folder: os.unlink(name, dir_fd=folder))
        for removed_stage in removed:
            with suppress(OSError):  # something else is in it, or a build has put something there
                os.rmdir(cache_place() / removed_stage.stage)
        with suppress(OSError):
            os.rmdir(cache_place())
        return removed


def _counted(act: Callable[[str, int], None]) -> tuple[Kept, ...]:
    """Does `act` with the name of every file of ours and the descriptor of its folder."""
    try:
        root = _opened(cache_place().resolve())
    except FileNotFoundError:
        return ()
    os.close(root)
    stages = []
    for place in sorted(path for path in cache_place().resolve().iterdir() if path.is_dir() and not path.is_symlink()):
        folder, files, size = _opened(place), 0, 0
        try:
            for name in os.listdir(folder):
                if (length := _ours(name, folder)) is not None:
                    act(name, folder)
                    files, size = files + 1, size + length
        finally:
            os.close(folder)
        stages += [Kept(stage=place.name, files=files, bytes=size)] if files else []
    return tuple(stages)


def _ours(name: str, folder: int) -> int | None:
    """The bytes of a file that `remember` wrote or began to write, None for any other."""
    begun = name.startswith(BEGUN)
    if not begun and not re.fullmatch("[0-9a-f]{64}", name):
        return None
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        is_ours = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
        return about.st_size if is_ours and MAGIC.startswith(file.read(len(MAGIC)) or (MAGIC if begun else b"-")) else None


BEGUN = ".new-"
"""How the name of a file begins that is being written, or was when the process was killed."""


def _head(path: Path, data: bytes) -> bytes:
    """The length and the hash of an entry.  One that was moved to another name is none there."""
    name = f"{path.parent.name}/{path.name}".encode()
    return len(data).to_bytes(8, "little") + hashlib.sha256(name + b"\0" + data).digest()


def _opened(folder: Path) -> int:
    """A descriptor of a folder of the cache.  Raises cache-unsafe when it is not the user's own, FileNotFoundError."""
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
    """The contents of a file in a folder.  Raises OSError for anything but a whole file of the user's own."""
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or not _private(about):
            raise OSError(errno.EACCES, "not a file of the user's own", name)
        start = file.read(HEAD)
        size = int.from_bytes(start[len(MAGIC) : len(MAGIC) + 8], "little")
        if start[: len(MAGIC)] != MAGIC or about.st_size != HEAD + size:
            raise OSError(errno.EINVAL, "damaged", name)  # before a sparse file is read
        return start + file.read(size)


def _private(about: os.stat_result) -> bool:
    return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """Says of what cannot be written that it is the cache."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise disk_full(folder, CACHE) from error
        raise BuildError("cache-unwritable", f"{folder}: the folder of compiled kernels: {error.strerror}") from error


@cache
def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # late: a build has it, and `doctor` only wants the folder's name

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
