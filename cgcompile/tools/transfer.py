"""push and pull: a bundle to and from a folder or an object store, by fsspec.

At its URL a bundle is a folder as on disk.  It is whole or absent: the manifest comes last, and goes first where a bundle is
replaced.  Files travel to `.push/` and get their names when all are there, so that a push that was interrupted goes on with what
lacks.  A pull does the same on this side, to within a file, and takes nothing whose SHA-256 is not the manifest's.

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cgbundle.errors import BundleError
from cgbundle.format import limits, manifest_json
from cgbundle.format.archive import Archive
from cgbundle.format.file_names import MANIFEST, SIGNATURE, SIGNATURE_BYTES, folders
from cgbundle.format.open_files import CHUNK
from cgbundle.format.schema import File, Manifest
from cgbundle.signatures import signature_file
from cgbundle.validate.bundle import check_bundle
from cgbundle.validate.manifest import check_manifest

from ..errors import BuildError
from ..pipeline.destination import check_free, destination_path, link, staged_bundle

STAGE = ".push"

AT_ONCE = 8
"""Files that a pull reads at a time: an object store answers each after tens of milliseconds, and a bundle may have thousands."""

BLOCK = 4 * CHUNK
"""Bytes that are asked of an object store at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transferred:
    """A bundle that was pushed or pulled: its new place, its manifest, and the bytes that were sent this time."""

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
        return f"{self.root}/{name}"

    def pieces(self, name: str, limit: int, begin: int = 0) -> Iterator[bytes]:
        """A file from a byte on, up to a byte over the limit.  Raises remote-failed.

        A server of HTTP that has no parts of files sends it from its first byte: whoever reads sees that by the hash.
        """
        options: dict[str, Any] = {"block_size": BLOCK}
        if "http" in self.system.protocol:  # as a stream: of a part, fsspec takes as much as the server sends
            ranged = {"Range": f"bytes={begin}-"} if begin else {}
            options = {"block_size": 0, "headers": self.system.kwargs.get("headers", {}) | ranged}
        with _remote_errors(f"{self.url}/{name}"), self.system.open(self.path(name), "rb", **options) as file:
            if options["block_size"]:
                file.seek(begin)
            while begin <= limit and (piece := file.read(min(BLOCK, limit + 1 - begin))):
                begin += len(piece)
                yield piece

    def read(self, name: str, limit: int) -> bytes | None:
        """A small file's contents, None where there is none.  Raises file-damaged for one over the limit, remote-failed."""
        try:
            data = b"".join(self.pieces(name, limit))
        except BuildError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        if len(data) > limit:
            raise BundleError("file-damaged", f"{self.url}/{name}: more than the limit of {limit} bytes")
        return data

    def sizes(self, names: set[str]) -> dict[str, int]:
        """The bytes of every file in these folders, and in the folder itself.  Raises file-damaged for a link: it leads out."""
        rows: dict[str, int] = {}
        for folder in sorted({*names, ""}):  # the outer ones first
            with suppress(FileNotFoundError):
                for row in self.system.ls(self.path(folder).rstrip("/"), detail=True):
                    name = f"{folder}/{row['name'].rstrip('/').rpartition('/')[2]}".removeprefix("/")
                    if row.get("islink") or row.get("type") == "link":
                        raise BundleError("file-damaged", f"{self.url}/{name}: a symbolic link, which a bundle must not hold")
                    rows[name] = row.get("size") or 0
        return rows

    def move(self, name: str, to: str) -> None:
        """Gives a file another name, in the place of what has it."""
        self.system.makedirs(self.path(to).rpartition("/")[0], exist_ok=True)
        self.system.mv(self.path(name), self.path(to))

    def put(self, data: bytes, name: str) -> None:
        """Writes a small file, whole or not at all."""
        self.system.makedirs(self.path(STAGE), exist_ok=True)
        self.system.pipe_file(self.path(f"{STAGE}/{name}"), data)
        self.move(f"{STAGE}/{name}", name)


def push(bundle: str | os.PathLike[str], url: str, *, replace: bool = False) -> Transferred:
    """Copies the bundle at `bundle` to `url`, the folder of the bundle there.  `replace`: replaces an existing bundle.

    Checks every file first, as load(check="full").  Does not send files again that an earlier push sent, or that the remote bundle
    already has.  Removes the files of a replaced bundle, if its manifest is valid.  Raises output-exists, extra-missing,
    remote-invalid, remote-failed, and the errors of `cgbundle.load` for a damaged bundle, here or there.
    """
    source = Archive(os.fspath(bundle))
    check_bundle(source, "full")
    manifest, signature = source.manifest, signature_file(source)
    _check_apart(manifest)
    remote = _remote(url)
    with _remote_errors(url):
        there, moved = remote.read(MANIFEST, limits.JSON_BYTES), 0
        if there not in (None, source.text) and not replace:
            raise BuildError("output-exists", f"{url}: has another bundle", "give --force to replace it, or another URL")
        if there != source.text:
            before = None if there is None else _manifest(there, url, "remove what is there yourself, or give another URL")
            moved = len(source.text) + _put_files(remote, Path(bundle), manifest, before)
        if signature is not None:
            remote.put(signature, SIGNATURE)
        if there != source.text:
            remote.put(source.text, MANIFEST)
        if remote.system.exists(remote.path(STAGE)):  # an object store has no folder without files
            remote.system.rm(remote.path(STAGE), recursive=True)
    return Transferred(place=url, manifest=manifest, moved=moved)


def pull(url: str, out: str | os.PathLike[str] | None = None, *, replace: bool = False) -> Transferred:
    """Copies the bundle at `url` to `out` (default: the last part of the URL), atomically.  `replace`: replaces an existing bundle.

    Continues an interrupted pull of the same bundle, if its files beside `out` belong to this user only.

    Raises as `push`, not-a-bundle if the URL has no complete bundle, output-unwritable, output-busy, disk-full, and file-damaged
    for files that differ from the manifest.
    """
    remote = _remote(url)
    place = destination_path(out, url.rstrip("/").rpartition("/")[2].removesuffix(".cgb") or "bundle")
    check_free(place, replace)
    text, signature = remote.read(MANIFEST, limits.JSON_BYTES), remote.read(SIGNATURE, SIGNATURE_BYTES)
    if text is None:
        raise BundleError("not-a-bundle", f"{url}: no {MANIFEST} there: not a bundle, or its push is not complete")
    manifest = _manifest(text, url)
    left = place.parent / f".{place.name}.{hashlib.sha256(text).hexdigest()[:16]}.pull"
    distinct = sorted({file.sha256: file for file in manifest.files}.values(), key=lambda file: -file.bytes)  # the longest first
    with staged_bundle(place, replace) as stage, ThreadPoolExecutor(AT_ONCE) as pool:
        _make_own(left)
        try:
            moved = len(text) + sum(pool.map(partial(_get, remote, left), distinct))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
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
    return Remote(system, root.rstrip("/"), url.rstrip("/"))


@contextmanager
def _remote_errors(url: str) -> Iterator[None]:
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
    taken = {MANIFEST, SIGNATURE, STAGE} | {name.casefold() for file in manifest.files for name in folders(file.path)}
    for index, file in enumerate(manifest.files):
        path = file.path.casefold()
        if path in taken or path.partition("/")[0] == STAGE:
            text = f"{file.path!r} is apart from another name by upper and lower case alone, or lies where a push puts its own"
            raise BundleError("manifest-invalid", f"files[{index}].path: {text}")
        taken.add(path)


def _put_files(remote: Remote, folder: Path, manifest: Manifest, before: Manifest | None) -> int:
    """Puts the files in their places, in that of the bundle `before`.  Returns the bytes that travelled."""
    old = {file.path: file.sha256 for file in before.files} if before else {}
    new = {file.path: file.sha256 for file in manifest.files}
    there = remote.sizes({STAGE, *(name for path in (*old, *new) for name in folders(path))})
    lacking = {
        f"{STAGE}/{file.sha256}-{hashlib.sha256(file.path.encode()).hexdigest()[:16]}": file
        for file in sorted(manifest.files, key=lambda file: -file.bytes)
        if (old.get(file.path), there.get(file.path)) != (file.sha256, file.bytes)
    }
    travel = {staged: file for staged, file in lacking.items() if there.get(staged) != file.bytes}
    remote.system.makedirs(remote.path(STAGE), exist_ok=True)
    remote.system.put([str(folder / file.path) for file in travel.values()], [remote.path(staged) for staged in travel])
    for path in [*([MANIFEST] if before else ()), *sorted(({*old, SIGNATURE} - {*new}) & {*there})]:  # the manifest first
        remote.system.rm_file(remote.path(path))
    for staged, file in lacking.items():
        remote.move(staged, file.path)
    return sum(file.bytes for file in travel.values())


def _make_own(folder: Path) -> None:
    """Makes the folder of what a pull leaves when it is interrupted, or takes the one that is there.  Raises output-unwritable for
    one that is a link, another user's, or open to others: it may hold links."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            return
        text = f"{folder}: lies where a pull keeps what has arrived, and is not this user's folder alone"
        raise BuildError("output-unwritable", text, "remove it, or choose another place with -o") from None


def _get(remote: Remote, folder: Path, file: File) -> int:
    """Gets a file, or the rest of it, to `folder`, named by its SHA-256; returns the bytes that travelled."""
    place, moved = folder / file.sha256, 0
    with open(place, "a+b") as out:
        while True:
            out.seek(0)
            digest = hashlib.file_digest(out, "sha256")
            begun = done = out.tell()
            for piece in remote.pieces(file.path, file.bytes, begun) if begun < file.bytes else ():
                done += out.write(piece)
                digest.update(piece)
            moved += done - begun
            if (digest.hexdigest(), done) == (file.sha256, file.bytes):
                return moved
            if not begun:
                place.unlink()
                raise BundleError("file-damaged", f"{remote.url}/{file.path}: {done} bytes that differ from the manifest")
            out.truncate(0)  # what was left may be at fault: once more, all of it
