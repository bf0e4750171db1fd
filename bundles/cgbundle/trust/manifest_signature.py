"""The signature of a bundle: a file beside the manifest, over the manifest's bytes.

The manifest holds the hash of every other file, so that a signature of it is one of them all, once the hashes are checked.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BundleError
from ..format.archive import Archive
from ..format.file_names import SIGNATURE, SIGNATURE_BYTES
from . import ed25519
from .keys import Keys, public_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """What stands in the file: 32 bytes and 64.  `key` is who is said to have signed, until a reader finds it among his own."""

    key: bytes
    signature: bytes


def read(bundle: Archive) -> Signature | None:
    """The signature of a bundle, not checked; None without one.  Raises signature-wrong for a damaged file."""
    data = bundle.signature()
    if data is None:
        return None
    if len(data) != SIGNATURE_BYTES:
        raise BundleError("signature-wrong", f"{SIGNATURE}: longer or shorter than {SIGNATURE_BYTES} bytes")
    return Signature(key=data[: ed25519.KEY_BYTES], signature=data[ed25519.KEY_BYTES :])


def read_held(bundle: Archive) -> Signature | None:
    """As `read`; raises signature-wrong also for one that is not of the bundle's manifest, whoever made it."""
    found = read(bundle)
    if found is not None:
        check_holds(found, bundle.text)
    return found


def check(bundle: Archive, keys: Keys) -> Signature:
    """The signature by one of `keys` of the bytes of the bundle's manifest.

    Raises key-invalid, signature-missing, signature-wrong.
    """
    trusted = public_keys(keys)
    found = read(bundle)
    if found is None:
        raise BundleError("signature-missing", f"{SIGNATURE}: missing: the bundle is not signed")
    if found.key not in trusted:
        names = " or ".join([short(key) for key in trusted[:4]]) + (" or another" if len(trusted) > 4 else "")
        raise BundleError("signature-wrong", f"{SIGNATURE}: by key {short(found.key)}, expected {names}")
    check_holds(found, bundle.text)
    return found


def check_holds(found: Signature, manifest: bytes) -> None:
    """Raises signature-wrong unless the key that the signature names signed `manifest`."""
    if not ed25519.verify(found.key, manifest, found.signature):
        raise BundleError("signature-wrong", f"{SIGNATURE}: key {short(found.key)} did not sign this manifest")


def short(key: bytes) -> str:
    """A key as messages name it: its first 16 digits."""
    return f"{key.hex()[:16]}..."
