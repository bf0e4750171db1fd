"""A store of bundles: a folder where files that several bundles have are kept once.

    STORE/files/ab/abcd...          every file once, read-only, named by its SHA-256
    STORE/bundles/<digest>/         a bundle: a folder like any other, whose files are hard links to those
    STORE/classifier.cgb            a name: a symbolic link to a bundle, exchanged in one step

A bundle's digest is the SHA-256 of its manifest's bytes.  Processes that load two bundles of a store share the pages of the files
that both have.  What is in the store is never written to: a build that replaces a bundle makes new files.

Whoever adds holds a lock for reading on STORE/.lock, whoever collects one for writing.  Both end with the process, and what a
killed one leaves has a name that begins with a dot, which the next collection removes.  Collected is what no name leads to and no
program has loaded: a loaded one holds a lock of the kernel's on its manifest (see cgbundle/format/open_files.py), the one file that
no two bundles share.  Runtimes before this one lock the exam alone: then all bundles with that exam count as loaded.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from cgbundle.errors import BundleError
from cgbundle.format.archive import Archive
from cgbundle.format.file_names import EXAM, MANIFEST, SIGNATURE
from cgbundle.format.manifest_json import bundle_bytes, encode
from cgbundle.format.open_files import BEYOND, is_kept, pieces
from cgbundle.format.publish import UNLOCKABLE, staged
from cgbundle.format.schema import File, Manifest
from cgbundle.validate.bundle import check_manifest

from ..errors import BuildError

FILES, BUNDLES, LOCK = "files", "bundles", ".lock"
READ_ONLY = 0o444

FICLONE = 0x40049409
"""The request of ioctl that makes a file share another one's blocks until one is written to (linux/fs.h)."""

UNLINKABLE = frozenset({errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES})
"""What a file system without hard links says, one whose file has too many, and a kernel that lets nobody link another user's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A bundle of a store: its names, its digest, where it lies, the bytes of its files, those of files that no other bundle of the
    store has, and whether a program has it loaded."""

    names: tuple[str, ...]
    digest: str
    path: Path
    manifest: Manifest
    bytes: int
    own: int
    loaded: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """A bundle that was added: the path of its name, its digest, the bytes of its files, its manifest's
    among them, and of those that the store lacked."""

    path: Path
    digest: str
    bytes: int
    new: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What a collection removed: digests of bundles, and the number and bytes of files; and the digests of those without a name
    that stay, since they are loaded."""

    bundles: tuple[str, ...]
    files: int
    bytes: int
    loaded: tuple[str, ...]


class Store:
    """The store in folder `path`, which the first `add` makes.  Raises store-invalid for a folder that holds something else."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.exists() and not (self.path / LOCK).exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise BuildError("store-invalid", f"{self.path}: holds something else than a store")

    def add(self, bundle: str | os.PathLike[str], name: str = "", *, replace: bool = False) -> Added:
        """Adds the bundle at `bundle` as `name`, by default its folder's.  With `replace`, a name that leads to another bundle
        leads to this one from then on.

        Copied is what the store lacks, and hashed while it is.  The bundle is untouched.  Its signature comes along.
        Raises output-exists for a name that is taken, store-name-invalid, file-damaged, and as `cgbundle.load` for no bundle.
        """
        source = Archive(os.fspath(bundle))
        check_manifest(source.manifest)
        link = self._name(name or Path(os.path.abspath(bundle)).name)
        digest = hashlib.sha256(source.text).hexdigest()
        with self._made(fcntl.LOCK_SH):
            self._check_free(link, digest, replace)
            new = sum([self._keep(source, file) for file in {file.sha256: file for file in source.manifest.files}.values()])
            new += 0 if self._bundle(digest).exists() else len(source.text)
            self._place(source, digest)
            _put_link(link, f"{BUNDLES}/{digest}")
        return Added(path=link, digest=digest, bytes=bundle_bytes(source.manifest), new=new)

    def remove(self, name: str) -> None:
        """Takes a name away.  The bundle stays until `collect`.  Raises store-name-unknown."""
        with self._opened(fcntl.LOCK_SH):
            if name not in self._names():
                known = ", ".join(sorted(self._names())) or "none"
                raise BuildError("store-name-unknown", f"{self.path}: no bundle is called {name!r}; there are {known}")
            (self.path / name).unlink()

    def bundles(self) -> tuple[Stored, ...]:
        """What is there: those with a name by name, then the others.  Raises store-missing; manifest-invalid for a damaged one."""
        with self._opened(fcntl.LOCK_SH):
            names, manifests = self._names(), {digest: Archive(str(self._bundle(digest))).manifest for digest in self._digests()}
            counts = Counter([each for manifest in manifests.values() for each in _contents(manifest)])
            found = [
                Stored(
                    names=tuple(sorted(name for name, led in names.items() if led == digest)),
                    digest=digest,
                    path=self._bundle(digest),
                    manifest=manifest,
                    bytes=bundle_bytes(manifest),
                    own=len(encode(manifest)) + sum(size for each, size in _contents(manifest).items() if counts[each] == 1),
                    loaded=self._is_loaded(digest),
                )
                for digest, manifest in manifests.items()
            ]
        return tuple(sorted(found, key=lambda each: (not each.names, each.names, each.digest)))

    def collect(self, *, dry_run: bool = False) -> Collected:
        """Removes the bundles that no name leads to, but for those that are loaded, then the files that no bundle has.  With
        `dry_run` it only says what it would.  Raises store-busy while a process adds, store-missing."""
        with self._opened(fcntl.LOCK_EX):
            kept = set(self._names().values())
            unnamed = [digest for digest in self._digests() if digest not in kept]
            loaded = tuple(digest for digest in unnamed if self._is_loaded(digest))
            gone = tuple(digest for digest in unnamed if digest not in loaded)
            left = [digest for digest in self._digests() if digest not in gone]
            needed = {each for digest in left for each in _contents(Archive(str(self._bundle(digest))).manifest)}
            files = [file for file in self._files() if file.name not in needed]
            freed = sum(file.stat().st_size for file in files)
            if not dry_run:
                self._remove(gone, files)
        return Collected(bundles=gone, files=len(files), bytes=freed, loaded=loaded)

    # --- inside -----------------------------------------------------------------------------------------------

    def _name(self, name: str) -> Path:
        if name in (FILES, BUNDLES) or name.startswith(".") or "/" in name or not name.isprintable() or not name:
            raise BuildError("store-name-invalid", f"{name!r}: no name for a bundle of a store")
        return self.path / name

    def _bundle(self, digest: str) -> Path:
        return self.path / BUNDLES / digest

    def _file(self, digest: str) -> Path:
        return self.path / FILES / digest[:2] / digest

    def _digests(self) -> list[str]:
        return sorted(each.name for each in (self.path / BUNDLES).iterdir() if re.fullmatch("[0-9a-f]{64}", each.name))

    def _files(self) -> Iterator[Path]:
        """Every file that is kept, whole or left half-written."""
        return (path for folder in sorted((self.path / FILES).iterdir()) for path in sorted(folder.iterdir()))

    def _names(self) -> dict[str, str]:
        """Every name, and the digest that it leads to."""
        links = {each.name: os.readlink(each) for each in self.path.iterdir() if each.is_symlink() and each.name[0] != "."}
        return {name: target.removeprefix(f"{BUNDLES}/") for name, target in links.items()}

    def _check_free(self, link: Path, digest: str, replace: bool) -> None:
        led = self._names().get(link.name)
        if os.path.lexists(link) and led is None:
            raise BuildError("store-name-invalid", f"{link}: exists and is none of the store's names")
        if led not in (None, digest) and not replace:
            raise BuildError("output-exists", f"{link}: is another bundle", "give --force to exchange it, or --name NAME")

    def _is_loaded(self, digest: str) -> bool:
        folder = self._bundle(digest)
        try:
            return _is_locked(folder / MANIFEST, 0) or _is_locked(folder / EXAM, BEYOND)
        except OSError as error:
            if error.errno in UNLOCKABLE:
                raise _unlockable(self.path) from None
            raise

    def _keep(self, source: Archive, file: File) -> int:
        """Takes a file in; returns its bytes, or 0 for one that the store has."""
        place = self._file(file.sha256)
        with suppress(FileNotFoundError):
            if place.stat().st_size == file.bytes:
                return 0
            place.unlink()
        place.parent.mkdir(exist_ok=True)
        part = place.with_name(f".{uuid4().hex}.part")
        try:
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _copy(source.descriptor(file.path), descriptor, file)
                os.fchmod(descriptor, READ_ONLY)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
                source.drop(file.path)
            with suppress(FileExistsError):  # another process was quicker, and bundles may have links to its file already
                link(part, place)
        finally:
            part.unlink(missing_ok=True)
        return file.bytes

    def _place(self, source: Archive, digest: str) -> None:
        """The folder of a bundle whose files the store has.  One that is there gets the signature, where it comes with one."""
        folder, signature = self._bundle(digest), source.signature()
        if not folder.exists():
            with suppress(FileExistsError, BlockingIOError), staged(folder, replace=False) as stage:
                for file in source.manifest.files:
                    (stage / file.path).parent.mkdir(parents=True, exist_ok=True)
                    link(self._file(file.sha256), stage / file.path)
                (stage / MANIFEST).write_bytes(source.text)
                (stage / MANIFEST).chmod(READ_ONLY)
        if signature is not None:
            made = self.path / f".{uuid4().hex}.sig"
            made.write_bytes(signature)
            os.replace(made, folder / SIGNATURE)

    def _remove(self, bundles: Iterable[str], files: Iterable[Path]) -> None:
        for digest in bundles:
            aside = self.path / BUNDLES / f".{digest}.removed"  # what is half removed is no bundle
            self._bundle(digest).rename(aside)
            shutil.rmtree(aside)
        for file in files:
            file.unlink()
        for folder in (self.path, self.path / BUNDLES):
            for left in [each for each in folder.iterdir() if each.name.startswith(".") and each.name != LOCK]:
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()

    @contextmanager
    def _made(self, lock: int) -> Iterator[None]:
        for folder in (FILES, BUNDLES):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        (self.path / LOCK).touch()
        with self._opened(lock):
            yield

    @contextmanager
    def _opened(self, lock: int) -> Iterator[None]:
        if not (self.path / LOCK).exists():
            raise BuildError("store-missing", f"{self.path}: no such store")
        descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BuildError("store-busy", f"{self.path}: another process adds to the store, or removes from it") from None
            except OSError as error:
                if error.errno in UNLOCKABLE:
                    raise _unlockable(self.path) from None
                raise
            yield
        finally:
            os.close(descriptor)


def _unlockable(path: Path) -> BuildError:
    return BuildError("store-invalid", f"{path}: its file system has no locks, so that nobody can tell what is loaded")


def _is_locked(file: Path, end: int) -> bool:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return is_kept(descriptor, end)
    finally:
        os.close(descriptor)


def _copy(source: int, target: int, file: File) -> None:
    """Raises file-damaged unless what arrives has the manifest's hash."""
    digest = hashlib.sha256()
    try:
        fcntl.ioctl(target, FICLONE, source)
        for piece in pieces(target, file.path, file.bytes):
            digest.update(piece)
    except OSError:  # another file system, or one that shares no blocks
        with open(target, "wb", closefd=False) as out:
            for piece in pieces(source, file.path, file.bytes):
                digest.update(piece)
                out.write(piece)
    if digest.hexdigest() != file.sha256:
        raise BundleError("file-damaged", f"{file.path}: SHA-256 is {digest.hexdigest()[:16]}..., expected {file.sha256[:16]}...")


def link(file: Path, place: Path) -> None:
    """A hard link, or a copy where there can be none.  Raises FileExistsError."""
    try:
        os.link(file, place)
    except OSError as error:
        if error.errno not in UNLINKABLE:
            raise
        made = place.with_name(f".{uuid4().hex}.part")
        shutil.copy(file, made)  # it takes its own space; all else holds
        made.rename(place)


def _put_link(link: Path, target: str) -> None:
    made = link.with_name(f".{uuid4().hex}.link")
    os.symlink(target, made)
    os.replace(made, link)


def _contents(manifest: Manifest) -> Mapping[str, int]:
    """The bytes of every file, by its SHA-256."""
    return {file.sha256: file.bytes for file in manifest.files}
