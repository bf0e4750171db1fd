"""push and pull: a bundle to and from a folder or an object store, by fsspec.

At its URL a bundle is a folder as on disk.  It is whole or absent: the manifest comes last, and goes first where a bundle is
replaced.  Files travel to `.push/<sha256>` and get their names when all are there, so that a push that was interrupted goes on with
what lacks.  A pull does the same on this side, to within a file, and takes nothing whose SHA-256 is not the manifest's.

One push to a URL at a time: object stores have no locks.  Of two at once the files may be of both, which every pull refuses.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgbundle.errors import BundleError
from cgbundle.format import limits, manifest_json
from cgbundle.format.archive import Archive
from cgbundle.format.file_names import MANIFEST, SIGNATURE, SIGNATURE_BYTES
from cgbundle.format.open_files import CHUNK
from cgbundle.format.schema import File, Manifest
from cgbundle.validate.bundle import check_bundle, check_manifest

from ..errors import BuildError
from ..pipeline.destination import check_free, destination_path, staged_bundle
from .store import link

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
            return int(self.system.info(self.path(name))["size"])
        except FileNotFoundError:
            return -1

    def read(self, name: str, limit: int) -> bytes | None:
        """A small file's contents, None where there is none.  Raises file-damaged for one over the limit."""
        size = self.size(name)
        if size > limit:
            raise BundleError("file-damaged", f"{self.url}/{name}: {size} bytes, more than the limit of {limit}")
        return None if size < 0 else bytes(self.system.cat_file(self.path(name)))

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
    this one, does not travel again.
    Raises output-exists, extra-missing, remote-invalid, remote-failed, and as `cgbundle.load` for what is no sound bundle.
    """
    source = Archive(os.fspath(bundle))
    check_bundle(source, "full")
    manifest, signature = source.manifest, source.signature()
    remote = _remote(url)
    with _told(url):
        there = remote.read(MANIFEST, limits.JSON_BYTES)
        if there not in (None, source.text) and not replace:
            raise BuildError("output-exists", f"{url}: has another bundle", "give --force to replace it, or another URL")
        if there == source.text:
            moved = 0
        else:
            moved = len(source.text) + _put_files(remote, Path(bundle), manifest, manifest_json.decode(there) if there else None)
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

    What an interrupted pull of the same bundle left beside `out` is gone on with.  Raises as `push`, not-a-bundle where the URL has
    no whole bundle, output-unwritable, output-busy, disk-full, and file-damaged for files that are not the manifest's.
    """
    remote = _remote(url)
    place = destination_path(out, url.rstrip("/").rpartition("/")[2].removesuffix(".cgb") or "bundle")
    check_free(place, replace)
    with _told(url):
        text = remote.read(MANIFEST, limits.JSON_BYTES)
        signature = remote.read(SIGNATURE, SIGNATURE_BYTES)
    if text is None:
        raise BundleError("not-a-bundle", f"{url}: no {MANIFEST} there: no bundle, or one that was not pushed to its end")
    manifest = manifest_json.decode(text)
    check_manifest(manifest)
    left = place.parent / f".{place.name}.{hashlib.sha256(text).hexdigest()[:16]}.pull"
    with staged_bundle(place, replace) as stage:
        left.mkdir(exist_ok=True)
        moved = len(text) + sum(_each(lambda file: _get(remote, file, left / file.sha256), _distinct(manifest)))
        for file in manifest.files:
            (stage / file.path).parent.mkdir(parents=True, exist_ok=True)
            link(left / file.sha256, stage / file.path)
        (stage / MANIFEST).write_bytes(text)
        if signature is not None:
            (stage / SIGNATURE).write_bytes(signature)
        check_bundle(Archive(str(stage)))
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
    try:
        yield
    except OSError as error:
        raise BuildError("remote-failed", f"{url}: {error.strerror or error or type(error).__name__}") from error


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

    def put(file: File) -> int:
        staged = f"{STAGE}/{file.sha256}-{file.path.replace('/', '-')}"
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
        remote.move(f"{STAGE}/{file.sha256}-{file.path.replace('/', '-')}", file.path)
    return moved


def _get(remote: Remote, file: File, place: Path) -> int:
    """Gets a file, or the rest of it; returns the bytes that travelled."""
    if place.exists():  # only what has the hash gets its name
        return 0
    part, digest = place.with_name(f"{place.name}.part"), hashlib.sha256()
    with open(part, "a+b") as out:
        out.seek(0)
        while piece := out.read(CHUNK):
            digest.update(piece)
        done = begun = out.tell()
        with _told(f"{remote.url}/{file.path}"):
            opened = remote.system.open(remote.path(file.path), "rb", block_size=BLOCK)
        with opened:
            opened.seek(done)
            while True:
                with _told(f"{remote.url}/{file.path}"):
                    piece = opened.read(BLOCK)
                if not piece:
                    break
                out.write(piece)
                digest.update(piece)
                done += len(piece)
    if done != file.bytes or digest.hexdigest() != file.sha256:
        part.unlink()
        raise BundleError("file-damaged", f"{remote.url}/{file.path}: {done} bytes that are not the manifest's")
    part.rename(place)
    return done - begun
