"""push and pull: copy a bundle to and from a folder or an object store, with fsspec.

At its URL a bundle is a folder, as on disk.  The manifest is written last, and removed first when a bundle is replaced, so that a
bundle is complete or absent.  Files are sent to `.push/`, and renamed when all of them have arrived.  A second push continues an
interrupted one.  A second pull does so too, even within a file, and accepts only files with the SHA-256 of the manifest.

Remote data is untrusted.  A manifest is checked completely before its paths are used, also that of a replaced bundle.  Reads stop
one byte after the length in the manifest.  The hashes of a pulled bundle are checked in a temporary folder before it is renamed.

Only one push may write to a URL at a time, because object stores have no locks.  Two pushes may mix their files, and then pulls
fail.
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
from cgbundle.format.schema import File, Manifest
from cgbundle.process import CHUNK
from cgbundle.signatures import signature_file
from cgbundle.validate.bundle import check_bundle
from cgbundle.validate.manifest import check_manifest

from ..errors import BuildError
from ..pipeline.destination import check_free, destination_path, link, staged_bundle

STAGE = ".push"

AT_ONCE = 8
"""Parallel reads of a pull: an object store takes tens of milliseconds per request, and a bundle may have thousands of files."""

BLOCK = 4 * CHUNK
"""Bytes of one read from an object store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transferred:
    """A bundle that was pushed or pulled: its new place, its manifest, and the bytes that were sent this time."""

    place: str
    manifest: Manifest
    moved: int


@dataclass(frozen=True, slots=True)
class Remote:
    """A folder in a file system of fsspec: the file system, the path, and the URL from the user."""

    system: Any
    root: str
    url: str

    def path(self, name: str) -> str:
        """Returns the path of a file in the folder."""
        return f"{self.root}/{name}"

    def pieces(self, name: str, limit: int, begin: int = 0) -> Iterator[bytes]:
        """Yields a file from byte `begin` on, up to one byte over `limit`.  Raises remote-failed.

        An HTTP server without range requests sends the whole file; the caller detects this by the hash.
        """
        options: dict[str, Any] = {"block_size": BLOCK}
        if "http" in self.system.protocol:  # as a stream, because fsspec's range reads accept any amount of data from the server
            ranged = {"Range": f"bytes={begin}-"} if begin else {}
            options = {"block_size": 0, "headers": self.system.kwargs.get("headers", {}) | ranged}
        with _remote_errors(f"{self.url}/{name}"), self.system.open(self.path(name), "rb", **options) as file:
            if options["block_size"]:
                file.seek(begin)
            while begin <= limit and (chunk := file.read(min(BLOCK, limit + 1 - begin))):
                begin += len(chunk)
                yield chunk

    def read(self, name: str, limit: int) -> bytes | None:
        """Reads a small file, None if it does not exist.  Raises file-damaged if it is larger than the limit, remote-failed."""
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
        """Returns the sizes in bytes, by path, of files in the folders `names` and in the root.  Raises file-damaged for a symbolic
        link, which may point outside the bundle."""
        rows: dict[str, int] = {}
        for folder in sorted({*names, ""}):  # parents first
            with suppress(FileNotFoundError):
                for row in self.system.ls(self.path(folder).rstrip("/"), detail=True):
                    name = f"{folder}/{row['name'].rstrip('/').rpartition('/')[2]}".removeprefix("/")
                    if row.get("islink") or row.get("type") == "link":
                        raise BundleError("file-damaged", f"{self.url}/{name}: a symbolic link, which a bundle must not hold")
                    rows[name] = row.get("size") or 0
        return rows

    def move(self, name: str, to: str) -> None:
        """Renames a file and replaces an existing one."""
        self.system.makedirs(self.path(to).rpartition("/")[0], exist_ok=True)
        self.system.mv(self.path(name), self.path(to))

    def put(self, data: bytes, name: str) -> None:
        """Writes a small file atomically."""
        self.system.makedirs(self.path(STAGE), exist_ok=True)
        self.system.pipe_file(self.path(f"{STAGE}/{name}"), data)
        self.move(f"{STAGE}/{name}", name)


def push(bundle: str | os.PathLike[str], url: str, *, replace: bool = False) -> Transferred:
    """Copies the bundle at `bundle` to the folder `url`.  `replace`: replaces an existing bundle.

    Checks every file first, as load(check="full").  Skips files that an earlier push sent, or that the remote bundle has.  Removes
    the files of a replaced bundle, if its manifest is valid.  Raises output-exists, extra-missing, remote-invalid, remote-failed,
    and the errors of `cgbundle.load` for a damaged bundle, local or remote.
    """
    source = Archive(os.fspath(bundle))
    check_bundle(source, "full")
    manifest, signature = source.manifest, signature_file(source)
    _check_apart(manifest)
    remote = _remote(url)
    with _remote_errors(url):
        text, moved = remote.read(MANIFEST, limits.JSON_BYTES), 0
        if text not in (None, source.text) and not replace:
            raise BuildError(
                "output-exists", f"{url}: another bundle is there already", "give --force to replace it, or another URL"
            )
        if text != source.text:
            old = None if text is None else _manifest(text, url, "remove what is there yourself, or give another URL")
            moved = len(source.text) + _put_files(remote, Path(bundle), manifest, old)
        if signature is not None:
            remote.put(signature, SIGNATURE)
        if text != source.text:
            remote.put(source.text, MANIFEST)
        if remote.system.exists(remote.path(STAGE)):  # an object store has no empty folders
            remote.system.rm(remote.path(STAGE), recursive=True)
    return Transferred(place=url, manifest=manifest, moved=moved)


def pull(url: str, out: str | os.PathLike[str] | None = None, *, replace: bool = False) -> Transferred:
    """Copies the bundle at `url` to `out` (default: the last part of the URL), atomically.  `replace`: replaces an existing bundle.

    Continues an interrupted pull of the same bundle, if only this user has access to the folder of partial files beside `out`.

    Raises the errors of `push`, output-unwritable, output-busy, disk-full, not-a-bundle if the URL has no complete bundle, and
    file-damaged for files that differ from the manifest.
    """
    remote = _remote(url)
    place = destination_path(out, url.rstrip("/").rpartition("/")[2].removesuffix(".cgb") or "bundle")
    check_free(place, replace)
    text, signature = remote.read(MANIFEST, limits.JSON_BYTES), remote.read(SIGNATURE, SIGNATURE_BYTES)
    if text is None:
        raise BundleError("not-a-bundle", f"{url}: no {MANIFEST} there: not a bundle, or its push is not complete")
    manifest = _manifest(text, url)
    partial_folder = place.parent / f".{place.name}.{hashlib.sha256(text).hexdigest()[:16]}.pull"
    distinct = sorted({file.sha256: file for file in manifest.files}.values(), key=lambda file: -file.bytes)  # largest first
    with staged_bundle(place, replace) as stage, ThreadPoolExecutor(AT_ONCE) as pool:
        _make_private(partial_folder)
        try:
            moved = len(text) + sum(pool.map(partial(_get, remote, partial_folder), distinct))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        for file in manifest.files:
            (stage / file.path).parent.mkdir(parents=True, exist_ok=True)
            link(partial_folder / file.sha256, stage / file.path)
        (stage / MANIFEST).write_bytes(text)
        if signature is not None:
            (stage / SIGNATURE).write_bytes(signature)
        check_bundle(Archive(str(stage)), "full")
    shutil.rmtree(partial_folder)
    return Transferred(place=str(place), manifest=manifest, moved=moved)


# --- helpers ----------------------------------------------------------------------------------------------------------


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
    # Several file systems of fsspec use aiohttp, which raises its own errors.
    client: type[Exception] = getattr(sys.modules.get("aiohttp"), "ClientError", OSError)
    try:
        yield
    except (OSError, ValueError, NotImplementedError, client) as error:
        message = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BuildError("remote-failed", f"{url}: {message}") from error


def _manifest(text: bytes, url: str, hint: str = "") -> Manifest:
    """Decodes a manifest from `url`, and checks it before its paths are used.  Raises the errors of `cgbundle.load`."""
    try:
        manifest = manifest_json.decode(text)
        check_manifest(manifest)
        _check_apart(manifest)
    except BundleError as error:
        raise BundleError(error.code, f"{url}: {error}", hint or error.hint) from None
    return manifest


def _check_apart(manifest: Manifest) -> None:
    """Raises manifest-invalid for two names that differ only in case, because some file systems treat them as equal.  Raises it
    also for names that a push uses itself."""
    used_names = {MANIFEST, SIGNATURE, STAGE} | {name.casefold() for file in manifest.files for name in folders(file.path)}
    for index, file in enumerate(manifest.files):
        path = file.path.casefold()
        if path in used_names or path.partition("/")[0] == STAGE:
            text = f"{file.path!r} differs from another name only in upper and lower case, or is a name that push reserves"
            raise BundleError("manifest-invalid", f"files[{index}].path: {text}")
        used_names.add(path)


def _put_files(remote: Remote, folder: Path, manifest: Manifest, prior: Manifest | None) -> int:
    """Sends the files, renames them, and removes other files of the bundle `prior`.  Returns the number of bytes that were sent."""
    old = {file.path: file.sha256 for file in prior.files} if prior else {}
    new = {file.path: file.sha256 for file in manifest.files}
    sizes = remote.sizes({STAGE, *(name for path in (*old, *new) for name in folders(path))})
    missing = {
        f"{STAGE}/{file.sha256}-{hashlib.sha256(file.path.encode()).hexdigest()[:16]}": file
        for file in sorted(manifest.files, key=lambda file: -file.bytes)
        if (old.get(file.path), sizes.get(file.path)) != (file.sha256, file.bytes)
    }
    unsent = {staged: file for staged, file in missing.items() if sizes.get(staged) != file.bytes}
    remote.system.makedirs(remote.path(STAGE), exist_ok=True)
    remote.system.put([str(folder / file.path) for file in unsent.values()], [remote.path(staged) for staged in unsent])
    for path in [
        *([MANIFEST] if prior else ()),
        *sorted(({*old, SIGNATURE} - {*new}) & {*sizes}),
    ]:  # the manifest first: without it there is no bundle
        remote.system.rm_file(remote.path(path))
    for staged, file in missing.items():
        remote.move(staged, file.path)
    return sum(file.bytes for file in unsent.values())


def _make_private(folder: Path) -> None:
    """Creates the folder for partial files of a pull, or reuses an existing one.  Raises output-unwritable if it
    is a link, or if other users have access to it: they could put links into it."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            return
        text = f"{folder}: pull needs this path for partial files, but it is a link or a file, or other users have access to it"
        raise BuildError("output-unwritable", text, "remove it, or choose another place with -o") from None


def _get(remote: Remote, folder: Path, file: File) -> int:
    """Downloads a file, or the part that is missing, to `folder`, under its SHA-256.  Returns the number of transferred bytes."""
    place, moved = folder / file.sha256, 0
    with open(place, "a+b") as out:
        while True:
            out.seek(0)
            digest = hashlib.file_digest(out, "sha256")
            begin = end = out.tell()
            for chunk in remote.pieces(file.path, file.bytes, begin) if begin < file.bytes else ():
                end += out.write(chunk)
                digest.update(chunk)
            moved += end - begin
            if (digest.hexdigest(), end) == (file.sha256, file.bytes):
                return moved
            if not begin:
                place.unlink()
                raise BundleError("file-damaged", f"{remote.url}/{file.path}: {end} bytes that differ from the manifest")
            out.truncate(0)  # the partial file may be damaged: download it again completely
