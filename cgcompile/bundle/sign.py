"""sign: an ed25519 signature over the bytes of a bundle's manifest.  Needs `cryptography`; the runtime checks without."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from cgbundle.errors import CallError
from cgbundle.format.archive import Archive
from cgbundle.format.file_names import SIGNATURE
from cgbundle.format.schema import Manifest
from cgbundle.trust import manifest_signature
from cgbundle.trust.keys import MAX_BYTES
from cgbundle.trust.manifest_signature import Signature
from cgbundle.validate import bundle as verify

from ..errors import BuildError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAKE = "openssl genpkey -algorithm ed25519 -out PRIVATE.pem makes one"
DECRYPT = "have openssl ask for its password: --key <(openssl pkey -in PRIVATE.pem)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Signed:
    """A signed bundle: its manifest, the public key (32 bytes), and whether there was a signature before, which is gone."""

    manifest: Manifest
    key: bytes
    replaced: bool


def sign(path: str | os.PathLike[str], key: str | os.PathLike[str]) -> Signed:
    """Signs the bundle at `path` with the private ed25519 key in the PEM file `key` (PKCS #8, not encrypted).

    Everything in the bundle is checked first, as by load(check="full"): what was signed is what the manifest says.
    Raises extra-missing, key-invalid, and as `check_bundle`.
    """
    folder = os.fspath(path)
    private = _private_key(os.fspath(key))
    bundle = Archive(folder)
    verify.check_bundle(bundle, "full")
    made = Signature(key=private.public_key().public_bytes_raw(), signature=private.sign(bundle.text))
    manifest_signature.check_holds(made, bundle.text)  # by other code than made it
    place = os.path.join(folder, SIGNATURE)
    before = os.path.lexists(place)
    _write(place, made.key + made.signature)
    return Signed(manifest=bundle.manifest, key=made.key, replaced=before)


def _private_key(path: str) -> Ed25519PrivateKey:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ModuleNotFoundError:
        hint = "pip install 'cryptography>=43'"
        raise BuildError("extra-missing", "signing needs cryptography, which is not installed", hint) from None
    with open(path, "rb") as file:
        text = file.read(MAX_BYTES)
    if b"BEGIN PUBLIC KEY" in text:
        raise CallError("key-invalid", f"{path}: a public key: only the private one signs", MAKE)
    try:
        key = load_pem_private_key(text, None)
    except TypeError:
        raise CallError("key-invalid", f"{path}: the key is encrypted", DECRYPT) from None
    except (ValueError, UnsupportedAlgorithm):
        raise CallError("key-invalid", f"{path}: no PEM file with a private key", MAKE) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise CallError("key-invalid", f"{path}: a private key, but none of ed25519", MAKE)
    return key


def _write(place: str, data: bytes) -> None:
    """Puts the signature's file in place: a reader finds the old or the new one, never half of it."""
    made = f"{place}.{uuid4().hex[:8]}"
    try:
        with open(made, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, place)
    except BaseException:
        if os.path.exists(made):
            os.unlink(made)
        raise
