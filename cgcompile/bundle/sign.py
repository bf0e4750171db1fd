"""Signs bundles: an ed25519 signature over the bytes of the manifest."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from cgbundle import signatures
from cgbundle.errors import CallError
from cgbundle.format.archive import Archive
from cgbundle.format.file_names import SIGNATURE
from cgbundle.format.schema import Manifest
from cgbundle.validate import bundle as verify

MAKE = "openssl genpkey -algorithm ed25519 -out PRIVATE.pem makes one"
DECRYPT = "have openssl ask for its password: --key <(openssl pkey -in PRIVATE.pem)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Signed:
    """A signed bundle: its manifest, the public key (32 bytes), and whether an earlier signature was replaced."""

    manifest: Manifest
    key: bytes
    replaced: bool


def sign(path: str | os.PathLike[str], key: str | os.PathLike[str]) -> Signed:
    """Signs the bundle at `path` with the private ed25519 key in the PEM file `key` (PKCS #8, not encrypted).

    Checks all files first, as load(check="full"), so that the signed manifest describes them.  Raises library-missing, key-invalid,
    and the errors of `cgbundle.load`.
    """
    folder = os.fspath(path)
    private = _private_key(os.fspath(key))
    bundle = Archive(folder)
    verify.check_bundle(bundle, "full")
    public: bytes = private.public_key().public_bytes_raw()
    signature_path = os.path.join(folder, SIGNATURE)
    existed = os.path.lexists(signature_path)
    _write(signature_path, public + private.sign(bundle.text))
    return Signed(manifest=bundle.manifest, key=public, replaced=existed)


def _private_key(path: str) -> Any:
    kind = signatures.ed25519().Ed25519PrivateKey
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    with open(path, "rb") as file:
        text = file.read(signatures.MAX_BYTES)
    if b"BEGIN PUBLIC KEY" in text:
        raise CallError("key-invalid", f"{path}: a public key, expected the private key", MAKE)
    try:
        key = load_pem_private_key(text, None)
    except TypeError:
        raise CallError("key-invalid", f"{path}: the key is encrypted", DECRYPT) from None
    except (ValueError, UnsupportedAlgorithm):
        raise CallError("key-invalid", f"{path}: not a PEM file with a private key", MAKE) from None
    if not isinstance(key, kind):
        raise CallError("key-invalid", f"{path}: a private key, but not an ed25519 key", MAKE)
    return key


def _write(path: str, data: bytes) -> None:
    """Writes the signature file atomically."""
    temporary = f"{path}.{uuid4().hex[:8]}"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
