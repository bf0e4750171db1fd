"""The signature of a bundle: a file beside the manifest, over the manifest's bytes.

The manifest holds the hash of every other file, so that a signature of it is one of them all, once the hashes are checked.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from ..errors import BundleError
from ..format.archive import SIGNATURE
from . import ed25519
from .keys import Keys, public_keys

BYTES = ed25519.KEY_BYTES + ed25519.SIGNATURE_BYTES
"""Of the file: the public key, then the signature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """What stands in the file.  `key` is who is said to have signed: it means nothing until it is one that the reader trusts."""

    key: bytes
    signature: bytes


def read(path: str) -> Signature | None:
    """The signature of the bundle at `path`, not checked; None without one.  Raises signature-wrong for a damaged file."""
    try:
        handle = os.open(os.path.join(path, SIGNATURE), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BundleError("signature-wrong", f"{SIGNATURE}: {error.strerror}") from None
    try:
        found = os.fstat(handle)
        plain = stat.S_ISREG(found.st_mode)
        data = os.read(handle, BYTES) if plain and found.st_size == BYTES else b""
    finally:
        os.close(handle)
    if len(data) != BYTES:
        size = f"{found.st_size} bytes" if plain else "not a file"
        raise BundleError("signature-wrong", f"{SIGNATURE}: {size}, expected {BYTES} bytes")
    return Signature(key=data[: ed25519.KEY_BYTES], signature=data[ed25519.KEY_BYTES :])


def read_held(path: str, manifest: bytes) -> Signature | None:
    """As `read`; raises signature-wrong also for one that is not of `manifest`, whoever made it."""
    found = read(path)
    if found is not None:
        check_holds(found, manifest)
    return found


def check(path: str, manifest: bytes, keys: Keys) -> Signature:
    """The signature by one of `keys` of `manifest`, which are the bytes of the manifest of the bundle at `path`.

    Raises key-invalid, signature-missing, signature-wrong.
    """
    trusted = public_keys(keys)
    found = read(path)
    if found is None:
        raise BundleError("signature-missing", f"{SIGNATURE}: missing: the bundle is not signed")
    if found.key not in trusted:
        names = " or ".join([short(key) for key in trusted[:4]]) + (" or another" if len(trusted) > 4 else "")
        raise BundleError("signature-wrong", f"{SIGNATURE}: by key {short(found.key)}, expected {names}")
    check_holds(found, manifest)
    return found


def check_holds(found: Signature, manifest: bytes) -> None:
    """Raises signature-wrong unless the key that the signature names signed `manifest`."""
    if not ed25519.verify(found.key, manifest, found.signature):
        raise BundleError("signature-wrong", f"{SIGNATURE}: key {short(found.key)} did not sign this manifest")


def short(key: bytes) -> str:
    """A key as messages name it: its first 16 digits."""
    return f"{key.hex()[:16]}..."
