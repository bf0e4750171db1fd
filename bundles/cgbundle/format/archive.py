"""Reading a bundle from disk: a directory with a manifest that names every other file, its length and its SHA-256."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence

from ..errors import BundleError
from . import limits, manifest_json
from .schema import File, Manifest

MANIFEST = "manifest.json"
PROGRAM = "program.pt2"
WEIGHTS = "weights.safetensors"
EXAM = "exam.safetensors"
KERNELS, HOST = "kernels/", "host/"

CHUNK = 4 << 20
"""Bytes read at a time."""


def read_manifest(path: str) -> Manifest:
    """The manifest of the bundle at `path`, its hash and types checked.

    Raises bundle-missing, not-a-bundle, format-unsupported, manifest-invalid.
    """
    try:
        with open(os.path.join(path, MANIFEST), "rb") as file:
            data = file.read(limits.JSON_BYTES + 1)
    except FileNotFoundError:
        if not os.path.lexists(path):
            raise BundleError("bundle-missing", f"{path}: no such bundle") from None
        raise BundleError("not-a-bundle", f"{path}: a directory without {MANIFEST}, not a bundle") from None
    except NotADirectoryError:
        raise BundleError("not-a-bundle", f"{path}: a file, not a bundle directory") from None
    except IsADirectoryError:
        raise BundleError("not-a-bundle", f"{path}: its {MANIFEST} is a directory, not a bundle") from None
    return manifest_json.decode(data)


def check_sizes(path: str, manifest: Manifest) -> None:
    """Raises file-damaged unless every file of the manifest is there with its length."""
    for file in manifest.files:
        try:
            found = os.stat(os.path.join(path, file.path))
        except (FileNotFoundError, NotADirectoryError):
            raise BundleError("file-damaged", f"{file.path}: missing") from None
        if not stat.S_ISREG(found.st_mode):
            raise BundleError("file-damaged", f"{file.path}: not a file")
        if found.st_size != file.bytes:
            raise BundleError("file-damaged", f"{file.path}: {found.st_size} bytes, expected {file.bytes}")


def check_hash(path: str, file: File) -> None:
    """Raises file-damaged unless the file's SHA-256 is the manifest's."""
    found = sha256(os.path.join(path, file.path))
    if found != file.sha256:
        raise BundleError("file-damaged", f"{file.path}: SHA-256 is {found[:16]}..., expected {file.sha256[:16]}...")


def read(path: str, file: File) -> bytes:
    """The contents of a file, its hash checked.  Raises file-damaged."""
    check_hash(path, file)
    with open(os.path.join(path, file.path), "rb") as opened:
        return opened.read()


def kernel_images(manifest: Manifest) -> set[str]:
    """The SHA-256 of every kernel image."""
    return {file.path.removeprefix(KERNELS) for file in manifest.files if file.path.startswith(KERNELS)}


def unlisted_files(path: str, manifest: Manifest) -> list[BundleError]:
    """A file-damaged for every file in the directory that the manifest does not name."""
    names = set(list_files(path)) - {file.path for file in manifest.files} - {MANIFEST}
    return [BundleError("file-damaged", f"{name}: not named in the manifest") for name in sorted(names)]


def exam_entry(key: Sequence[int], kind: str, index: int) -> str:
    """The name of an exam tensor: `8x128/input/0`; the key of a model without dimensions is `-`.  `kind`: input, output, or
    written, which is what the input of that number holds after the call."""
    return f"{'x'.join(map(str, key)) or '-'}/{kind}/{index}"


def sha256(path: str) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def list_files(path: str) -> list[str]:
    """Every file below `path`, relative, with forward slashes, sorted."""
    return sorted(
        os.path.relpath(os.path.join(folder, name), path).replace(os.sep, "/")
        for folder, _, names in os.walk(path)
        for name in names
    )


def describe_files(path: str) -> tuple[File, ...]:
    """The manifest's rows for everything below `path` but the manifest."""
    files = [(name, os.path.join(path, name)) for name in list_files(path) if name != MANIFEST]
    return tuple(File(path=name, bytes=os.stat(full).st_size, sha256=sha256(full)) for name, full in files)
