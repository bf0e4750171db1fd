"""Reads a bundle from disk: a directory with a manifest that names every other file, its length and its SHA-256."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from itertools import chain

from ..errors import BundleError
from ..process import DAMAGE, FOLDER, KeptFile, copied, open_directory, open_entry, open_file, pieces, when_gone
from . import limits, manifest_json
from .file_names import GRAPHS, HOST, KERNELS, MANIFEST, SELF_TEST, TABLES, WEIGHTS, rank_folder
from .safetensors import Entry, read_header
from .schema import File, Manifest

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from .safetensors_files import Mapped


class Archive:
    """The opened bundle at `path`. Its directory and each file are opened once, so that the bytes used are the bytes checked, even
    if the bundle is replaced or removed. `copy_weights`: weights are copied into memory of this process at their first use. Raises
    bundle-missing, not-a-bundle; manifest-invalid for a manifest above the size limit."""

    def __init__(self, path: str, *, copy_weights: bool = False, outer: Archive | None = None) -> None:
        """`outer`: the bundle of rank 0, if this is another rank's. Kernel images that both have are read from it."""
        self.path, self._copy_weights, self._outer = path, copy_weights, outer
        self._variant = 0
        self._folders: dict[str, int] = {}
        self._files: dict[str, int] = {}
        self._contents: dict[str, bytes] = {}
        self._changed: dict[str, int] = {}
        self._reading = threading.RLock()  # for a bundle on several devices, a thread per device reads it
        self._variants: manifest_json.Variants | None = None
        self._manifest: Manifest | None = None
        when_gone(self, map(os.close, chain.from_iterable(map(dict.values, (self._files, self._folders)))))
        self.reopen()

    @property
    def variants(self) -> manifest_json.Variants:
        """The manifests of all variants, their hash checked. Raises format-unsupported, manifest-invalid."""
        if self._variants is None:
            self._variants = manifest_json.Variants(self.text)
        return self._variants

    @property
    def manifest(self) -> Manifest:
        """The manifest of the variant that `choose` selected (default: the first). Raises format-unsupported, manifest-invalid."""
        if self._manifest is None:
            self._manifest = self.variants.manifest(self._variant)
        return self._manifest

    def choose(self, variant: int) -> None:
        if variant != self._variant:
            self._variant, self._manifest = variant, None

    def reopen(self) -> None:
        """Opens the bundle that is at the path now. Raises as the constructor."""
        self.close()
        self._contents.clear()
        self._variant, self._variants, self._manifest = 0, None, None
        while True:
            self._folders[""] = open_directory(self.path)
            try:
                self.text = self._read_manifest()
                return
            except BundleError:
                if not self.is_replaced():
                    raise
                self.close()

    def is_replaced(self) -> bool:
        """Whether the path no longer names the directory that was opened."""
        try:
            now, then = os.stat(self.path), os.fstat(self._folders[""])
        except OSError:
            return True
        return (now.st_dev, now.st_ino) != (then.st_dev, then.st_ino)

    def check_size(self, file: File) -> None:
        """Raises file-damaged unless the file exists, is a plain file, and has its length."""
        if not self._is_outer(file):
            size = os.fstat(self.descriptor(file.path)).st_size
            self.drop(file.path)
            if size != file.bytes:
                raise BundleError("file-damaged", f"{file.path}: {size} bytes, expected {file.bytes}")

    def check_hash(self, file: File) -> None:
        """Raises file-damaged for a wrong SHA-256. Keeps the contents of tables, kernel images and host code."""
        if file.path.startswith((GRAPHS, KERNELS, HOST)):
            self._contents[file.path] = self.contents(file)
        else:
            digest = hashlib.sha256()
            for piece in pieces(self.descriptor(file.path), file.path, file.bytes):
                digest.update(piece)
            self.drop(file.path)
            _check_digest(file, digest.hexdigest())

    def data(self, name: str) -> bytes:
        """The contents of a file, hash checked, read once. Raises file-damaged."""
        content = self._contents.get(name)
        if content is None:
            content = self._contents[name] = self.contents(self._row(name))
        return content

    def contents(self, file: File) -> bytes:
        """Reads a file and checks its hash. Raises file-damaged."""
        if self._is_outer(file):
            assert self._outer is not None
            return self._outer.data(file.path)
        if file.bytes > limits.HELD_BYTES:
            raise BundleError("file-damaged", f"{file.path}: {file.bytes} bytes, more than the limit of {limits.HELD_BYTES}")
        with self._reading:
            content = b"".join(pieces(self.descriptor(file.path), file.path, file.bytes))
            self.drop(file.path)
        _check_digest(file, hashlib.sha256(content).hexdigest())
        return content

    def tensors(self, name: str) -> dict[str, Entry]:
        """The header of a safetensors file.  Raises file-damaged, weights-invalid."""
        with self._reading, open(self.descriptor(name), "rb", closefd=False) as file:
            file.seek(0)
            return read_header(file, name)

    def mapped(self, name: str, *, writable: bool = False) -> Mapped:
        """A mapped safetensors file; the mapping outlives this object. Raises file-damaged, weights-invalid."""
        from .safetensors_files import Mapped  # few bundles for a GPU need one

        with self._reading:
            return Mapped(self.descriptor(name), name, writable=writable)

    def descriptor(self, name: str) -> int:
        """The open file, opened at its first use, for reads at offsets. Raises file-damaged."""
        with self._reading:
            fd = self._files.get(name)
            if fd is None:
                folder, _, last = name.rpartition("/")
                try:
                    fd = open_file(last, self.folder(folder))
                except BundleError as error:
                    raise BundleError("file-damaged", f"{name}: {error}") from None
                if name in (WEIGHTS, TABLES) and self._copy_weights:
                    fd = copied(fd)
                self._files[name], self._changed[name] = fd, os.fstat(fd).st_mtime_ns
            return fd

    def folder(self, name: str) -> int:
        """A folder of the bundle, opened at its first use; "" is the bundle itself. Raises file-damaged."""
        fd = self._folders.get(name)
        if fd is None:
            parent, _, last = name.rpartition("/")
            fd = self._folders[name] = open_entry(last, FOLDER, self.folder(parent))
        return fd

    def drop(self, name: str) -> None:
        """Closes a file that is not read again: a bundle may have more files than a process may open."""
        if name not in (WEIGHTS, TABLES, SELF_TEST):
            os.close(self._files.pop(name))

    def kept(self, name: str) -> KeptFile:
        """The open file again, for use after `close`."""
        return KeptFile(self.descriptor(name))

    def check_unchanged(self) -> None:
        for name, descriptor in self._files.items():
            if os.fstat(descriptor).st_mtime_ns != self._changed[name]:
                raise BundleError("file-damaged", f"{name}: was written to while the bundle was loaded", "load it again")

    def rank(self, number: int) -> Archive:
        """The bundle of another rank, inside this one. Raises file-damaged if its manifest is not the one that this manifest
        lists."""
        folder = rank_folder(number)
        try:
            archive = Archive(os.path.join(self.path, folder), copy_weights=self._copy_weights, outer=self)
        except BundleError as error:
            raise BundleError("file-damaged", f"{folder}{MANIFEST}: {error}") from None
        try:
            _check_digest(self._row(f"{folder}{MANIFEST}"), hashlib.sha256(archive.text).hexdigest())
        except BundleError:
            archive.close()
            raise
        return archive

    def close(self) -> None:
        for opened in (self._files, self._folders):
            while opened:
                os.close(opened.popitem()[1])

    def _read_manifest(self) -> bytes:
        try:
            descriptor = open_file(MANIFEST, self._folders[""])
        except BundleError as error:
            missing = str(error) == DAMAGE[errno.ENOENT]
            what = f"a directory without {MANIFEST}" if missing else f"its {MANIFEST} is {error}"
            raise BundleError("not-a-bundle", f"{self.path}: {what}, not a bundle") from None
        limit, status = limits.JSON_BYTES, os.fstat(descriptor)
        self._files[MANIFEST], self._changed[MANIFEST] = descriptor, status.st_mtime_ns
        if status.st_size > limit:
            raise BundleError("manifest-invalid", f"{MANIFEST}: {status.st_size} bytes, more than the limit of {limit}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit + 1)

    def _is_outer(self, file: File) -> bool:
        """Whether the file is a kernel image that rank 0's bundle has too."""
        return self._outer is not None and file.path.startswith(KERNELS) and file in self._outer.manifest.files

    def _row(self, name: str) -> File:
        row = next((file for file in self.manifest.files if file.path == name), None)
        if row is None:
            raise BundleError("file-damaged", f"{name}: the manifest does not list it")
        return row


def _check_digest(file: File, digest: str) -> None:
    if digest != file.sha256:
        raise BundleError("file-damaged", f"{file.path}: SHA-256 is {digest[:16]}..., expected {file.sha256[:16]}...")


def read_manifest(path: str) -> Manifest:
    return Archive(path).manifest


def read(path: str, file: File) -> bytes:
    """Reads a file of the bundle at `path` and checks its hash. Raises file-damaged."""
    return Archive(path).contents(file)
