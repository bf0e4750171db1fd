"""push and pull: a bundle to and from a folder or an object store, by fsspec.

At its URL a bundle is a folder as on disk.  It is whole or absent: the manifest comes last, and goes first where a bundle is
replaced.  Files travel to `.push/<sha256>` and get their names when all are there, so that a push that was interrupted goes on with
what lacks.  A pull does the same on this side, to within a file, and takes nothing whose SHA-256 is not the manifest's.

What is far away is a stranger's: a path is made of no manifest before all of it is checked, also of the one that a push replaces;
no file is read beyond the bytes that its manifest says; what a pull publishes is hashed where it lies.

One push to a URL at a time: object stores have no locks.  Of two at once the files may be of both, which every pull refuses.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cgbundle.errors import BundleError
from cgbundle.format import limits, manifest_json
from cgbundle.format.archive import Archive
from cgbundle.format.file_names import MANIFEST, SIGNATURE, SIGNATURE_BYTES, folders
from cgbundle.format.open_files import CHUNK
from cgbundle.format.schema import File, Manifest
from cgbundle.validate.bundle import check_bundle, check_manifest

from ..errors import BuildError
from ..pipeline.destination import check_free, destination_path, link, staged_bundle

STAGE = ".push"

AT_ONCE = 8
"""Files on their way at a time: an object store answers each after tens of milliseconds, and a bundle may have thousands."""

BLOCK = 4 * CHUNK
"""Bytes that are asked of an object store at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transferred:
    """A bundle that was pushed or pulled: where it is now, its manifest, and the bytes that travelled this time."""

    place: str
    manifest: Manifest
    moved: int


@dataclass(frozen=True, slots=True)
class Remote:
    """A folder that fsspec reaches: the file system, the folder's path there, and the URL as the user gave it."""

    system: Any
    root: str
    url: str

    def path(self, name: str) -> str:
        """The path of a file in the folder."""
        return f"{self.root.rstrip('/')}/{name}"

    def size(self, name: str) -> int:
        """The bytes of a file; -1 where there is none."""
        try:
            return int(self.system.info(self.path(name)).get("size") or 0)
        except FileNotFoundError:
            return -1

    def read(self, name: str, limit: int) -> bytes | None:
        """A small file's contents, None where there is none.  Raises file-damaged for one over the limit."""
        found = b""
        try:
            with self.open(name) as file:
                while len(found) <= limit and (piece := file.read(limit + 1 - len(found))):
                    found += piece
        except FileNotFoundError:
            return None
        if len(found) > limit:
            raise BundleError("file-damaged", f"{self.url}/{name}: more than the limit of {limit} bytes")
        return found

    def open(self, name: str, begin: int = 0) -> IO[bytes]:
        """A file from a byte on.  A server of HTTP that has no parts of files gives it from its first byte: whoever reads sees by
        the hash."""
        if "http" in self.system.protocol:  # as a stream: of a part, fsspec takes as much as the server sends
            headers = {**self.system.kwargs.get("headers", {}), **({"Range": f"bytes={begin}-"} if begin else {})}
            streamed: IO[bytes] = self.system.open(self.path(name), "rb", block_size=0, headers=headers)
            return streamed
        opened: IO[bytes] = self.system.open(self.path(name), "rb", block_size=BLOCK)
        opened.seek(begin)
        return opened

    def put(self, data: bytes, name: str) -> None:
        """Writes a small file, whole or not at all."""
        self.system.makedirs(self.path(STAGE), exist_ok=True)
        self.system.pipe_file(self.path(f"{STAGE}/{name}"), data)
        self.move(f"{STAGE}/{name}", name)

    def move(self, name: str, to: str) -> None:
        """Gives a file another name, in the place of what has it."""
        self.system.makedirs(self.path(to).rpartition("/")[0], exist_ok=True)
        self.system.mv(self.path(name), self.path(to))


def push(bundle: str | os.PathLike[str], url: str, *, replace: bool = False) -> Transferred:
    """Puts the bundle at `bundle` to `url`, which names the bundle's own folder there; `replace` a bundle that is there.

    Every file is checked first, as by load(check="full").  What an earlier push left, and what the bundle there has in common with
    this one, does not travel again.  The files of one that is replaced are removed by its manifest, if that is sound.
    Raises output-exists, extra-missing, remote-invalid, remote-failed, and as `cgbundle.load` for what is no sound bundle, here or
    there.
    """
    source = Archive(os.fspath(bundle))
    check_bundle(source, "full")
    manifest, signature = source.manifest, source.signature()
    _check_apart(manifest)
    remote = _remote(url)
    with _told(url):
        there = remote.read(MANIFEST, limits.JSON_BYTES)
        if there not in (None, source.text) and not replace:
            raise BuildError("output-exists", f"{url}: has another bundle", "give --force to replace it, or another URL")
        if there == source.text:
            moved = 0
        else:
            before = None if there is None else _manifest(there, url, "remove what is there yourself, or give another URL")
            _check_no_links(remote, (manifest, before) if before else (manifest,))
            moved = len(source.text) + _put_files(remote, Path(bundle), manifest, before)
        if signature is not None:
            remote.put(signature, SIGNATURE)
        elif there != source.text and remote.size(SIGNATURE) >= 0:
            remote.system.rm_file(remote.path(SIGNATURE))
        if there != source.text:
            remote.put(source.text, MANIFEST)
        if remote.system.exists(remote.path(STAGE)):  # an object store has no folder without files
            remote.system.rm(remote.path(STAGE), recursive=True)
    return Transferred(place=url, manifest=manifest, moved=moved)


def pull(url: str, out: str | os.PathLike[str] | None = None, *, replace: bool = False) -> Transferred:
    """Gets the bundle at `url`, to `out` (default: the last part of the URL), where it is whole or absent; `replace` one that
    is there.

    What an interrupted pull of the same bundle left beside `out` is gone on with, where it is this user's alone.

    Raises as `push`, not-a-bundle where the URL has no whole bundle, output-unwritable, output-busy, disk-full, and file-damaged
    for files that are not the manifest's.
    """
    remote = _remote(url)
    place = destination_path(out, url.rstrip("/").rpartition("/")[2].removesuffix(".cgb") or "bundle")
    check_free(place, replace)
    with _told(url):
        text = remote.read(MANIFEST, limits.JSON_BYTES)
        signature = remote.read(SIGNATURE, SIGNATURE_BYTES)
    if text is None:
        raise BundleError("not-a-bundle", f"{url}: no {MANIFEST} there: no bundle, or one that was not pushed to its end")
    manifest = _manifest(text, url)
    left = place.parent / f".{place.name}.{hashlib.sha256(text).hexdigest()[:16]}.pull"
    with staged_bundle(place, replace) as stage:
        _make_own(left)
        moved = len(text) + sum(_each(lambda file: _get(remote, file, left / file.sha256), _distinct(manifest)))
        for file in manifest.files:
            (stage / file.path).parent.mkdir(parents=True, exist_ok=True)
            link(left / file.sha256, stage / file.path)
        (stage / MANIFEST).write_bytes(text)
        if signature is not None:
            (stage / SIGNATURE).write_bytes(signature)
        check_bundle(Archive(str(stage)), "full")
    shutil.rmtree(left)
    return Transferred(place=str(place), manifest=manifest, moved=moved)


# --- inside -----------------------------------------------------------------------------------------------------------


def _remote(url: str) -> Remote:
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError:
        hint = "pip install 'fsspec>=2024.2'"
        raise BuildError("extra-missing", "push and pull need fsspec, which is not installed", hint) from None
    try:
        system, root = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise BuildError("extra-missing", f"{url}: {error}", "install the package that the message names") from None
    except ValueError as error:
        raise BuildError("remote-invalid", f"{url}: {error}") from None
    return Remote(system, root, url.rstrip("/"))


@contextmanager
def _told(url: str) -> Iterator[None]:
    # aiohttp lies under several file systems, and has errors of its own.
    client: type[Exception] = getattr(sys.modules.get("aiohttp"), "ClientError", OSError)
    try:
        yield
    except (OSError, ValueError, NotImplementedError, client) as error:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BuildError("remote-failed", f"{url}: {said}") from error


def _manifest(text: bytes, url: str, hint: str = "") -> Manifest:
    """The manifest that lies at a URL, all of it checked: paths are made of it.  Raises as `cgbundle.load`."""
    try:
        manifest = manifest_json.decode(text)
        check_manifest(manifest)
        _check_apart(manifest)
    except BundleError as error:
        raise BundleError(error.code, f"{url}: {error}", hint or error.hint) from None
    return manifest


def _check_apart(manifest: Manifest) -> None:
    """Raises manifest-invalid for two files that some folder or store takes for one, and for a file where a push puts its own."""
    seen = {name.casefold() for name in (MANIFEST, SIGNATURE, STAGE)}
    within = {each.casefold() for file in manifest.files for each in folders(file.path)}
    for index, file in enumerate(manifest.files):
        path = file.path.casefold()
        free = path not in seen and path not in within and path.partition("/")[0] != STAGE
        seen.add(path)
        if not free:
            text = f"{file.path!r} is apart from another name by upper and lower case alone, or lies where a push puts its own"
            raise BundleError("manifest-invalid", f"files[{index}].path: {text}")


def _check_no_links(remote: Remote, manifests: Sequence[Manifest]) -> None:
    """Raises file-damaged where a folder of a bundle, or what lies in the stage, is a link: it leads out of the target."""
    names = {each for manifest in manifests for file in manifest.files for each in folders(file.path)}
    for name in sorted(names | {STAGE}):
        with suppress(FileNotFoundError):
            row = remote.system.info(remote.path(name))
            rows = [row, *(remote.system.ls(remote.path(name), detail=True) if name == STAGE else ())]
            if any(row.get("islink") or row.get("type") == "link" for row in rows):
                raise BundleError("file-damaged", f"{remote.url}/{name}: a symbolic link, which a bundle must not hold")


def _make_own(folder: Path) -> None:
    """Makes the folder of what a pull leaves when it is interrupted, or takes the one that is there.  Raises output-unwritable for
    one that is a link or another user's: it may hold links."""
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            text = f"{folder}: lies where a pull keeps what has arrived, and is not this user's folder"
            raise BuildError("output-unwritable", text, "remove it, or choose another place with -o")
        if not found.st_mode & 0o077:
            return
        shutil.rmtree(folder)  # others could write to it


def _each(move: Callable[[File], int], files: Sequence[File]) -> list[int]:
    """`move` of all files, some at a time; after the first that fails no other begins."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            return list(pool.map(move, files))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _distinct(manifest: Manifest) -> list[File]:
    """A file for each content, the largest first: they take longest."""
    return sorted({file.sha256: file for file in manifest.files}.values(), key=lambda file: -file.bytes)


def _put_files(remote: Remote, folder: Path, manifest: Manifest, before: Manifest | None) -> int:
    """Puts the files in their places; `before` is the bundle that is there.  Returns the bytes that travelled."""
    same = {(file.path, file.sha256) for file in before.files} if before else set()
    lacking = [file for file in manifest.files if (file.path, file.sha256) not in same or remote.size(file.path) != file.bytes]
    remote.system.makedirs(remote.path(STAGE), exist_ok=True)

    def staged_as(file: File) -> str:
        return f"{STAGE}/{file.sha256}-{hashlib.sha256(file.path.encode()).hexdigest()[:16]}"

    def put(file: File) -> int:
        staged = staged_as(file)
        if remote.size(staged) == file.bytes:
            return 0
        remote.system.put_file(str(folder / file.path), remote.path(staged))
        return file.bytes

    moved = sum(_each(put, sorted(lacking, key=lambda file: -file.bytes)))
    if before is not None:
        remote.system.rm_file(remote.path(MANIFEST))
        for path in sorted({file.path for file in before.files} - {file.path for file in manifest.files}):
            remote.system.rm_file(remote.path(path))
    for file in lacking:
        remote.move(staged_as(file), file.path)
    return moved


def _get(remote: Remote, file: File, place: Path) -> int:
    """Gets a file, or the rest of it; returns the bytes that travelled."""
    if place.exists():
        with open(place, "rb") as left:
            digest, size = _hashed(left)
        if (digest.hexdigest(), size) == (file.sha256, file.bytes):
            return 0
        place.unlink()
    part, moved = place.with_name(f"{place.name}.part"), 0
    with open(part, "a+b") as out:
        while True:
            digest, begun = _hashed(out)
            done = begun if begun >= file.bytes else _receive(remote, file, out, digest, begun)
            moved += done - begun
            if (digest.hexdigest(), done) == (file.sha256, file.bytes):
                break
            if not begun:
                part.unlink()
                raise BundleError("file-damaged", f"{remote.url}/{file.path}: {done} bytes that are not the manifest's")
            out.truncate(0)  # what was left may be at fault: once more, all of it
    part.rename(place)
    return moved


def _hashed(file: IO[bytes]) -> tuple[Any, int]:
    """The digest of an open file's contents, to go on with, and their bytes; it stands at its end."""
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(CHUNK):
        digest.update(piece)
    return digest, file.tell()


def _receive(remote: Remote, file: File, out: IO[bytes], digest: Any, done: int) -> int:
    """Writes a file to `out` from byte `done` on; returns the bytes that it has, or more than the manifest says, of which none are
    written."""
    where = f"{remote.url}/{file.path}"
    with _told(where):
        opened = remote.open(file.path, done)
    with opened:
        while done <= file.bytes:
            with _told(where):
                piece = opened.read(min(BLOCK, file.bytes - done + 1))
            if not piece:
                break
            done += len(piece)
            if done <= file.bytes:
                out.write(piece)
                digest.update(piece)
    return done
