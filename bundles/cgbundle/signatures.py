"""Signatures of manifests, each in a file beside it, and the public keys that a caller trusts. A manifest has the hashes of all
other files. The package `cryptography` is imported only if a key is given."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from .errors import BundleError, CallError, MachineError
from .format.archive import Archive
from .format.file_names import SIGNATURE, SIGNATURE_BYTES
from .process import DAMAGE, open_file

Key: TypeAlias = str | os.PathLike[str] | bytes
"""The path of a PEM file, 64 hexadecimal digits, or 32 bytes."""

Keys: TypeAlias = Key | Sequence[Key]
"""Trusted public keys: the path of a PEM file, 64 hexadecimal digits or 32 bytes, or several of these."""

KEY_BYTES = 32

MAX_BYTES = 16 << 10  # maximum size of a PEM file: a key takes 113 bytes, the rest may be comments
PUBLIC = "openssl pkey -in PRIVATE.pem -pubout -out PUBLIC.pem, and give PUBLIC.pem: machines that only check need no private key"

FORGEABLE = frozenset(map(bytes.fromhex, (
    "00" * 32, "01" + "00" * 31, "ec" + "ff" * 30 + "7f", "ed" + "ff" * 30 + "7f", "ee" + "ff" * 30 + "7f",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
)))  # fmt: skip
"""Public keys of small order, without the sign bit: OpenSSL accepts them, but anybody can forge their signatures."""


class Signature(NamedTuple):
    """`key`: the public key that the file has, not yet compared with trusted keys."""

    key: bytes
    signature: bytes


def ed25519() -> Any:
    """The module `ed25519` of `cryptography`. Raises library-missing."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519 as module
    except ImportError:
        text = "keys and signatures need the package cryptography (extra `sign`), which is not installed"
        raise MachineError("library-missing", text, "pip install 'cryptography>=43'") from None
    return module


def signature_file(bundle: Archive) -> bytes | None:
    """The start of the signature file, up to one byte more than is valid; None without a file. Raises signature-wrong."""
    try:
        descriptor = open_file(SIGNATURE, bundle.folder(""))
    except BundleError as error:
        if str(error) == DAMAGE[errno.ENOENT]:
            return None
        raise BundleError("signature-wrong", f"{SIGNATURE}: {error}") from None
    try:
        return os.pread(descriptor, SIGNATURE_BYTES + 1, 0)
    finally:
        os.close(descriptor)


def read(bundle: Archive) -> Signature | None:
    """The unchecked signature of a bundle, or None. Raises signature-wrong."""
    data = signature_file(bundle)
    if data is not None and len(data) != SIGNATURE_BYTES:
        raise BundleError("signature-wrong", f"{SIGNATURE}: expected {SIGNATURE_BYTES} bytes")
    return None if data is None else Signature(key=data[:KEY_BYTES], signature=data[KEY_BYTES:])


def check(bundle: Archive, keys: Keys) -> Signature:
    """The bundle's signature, checked with `keys`. Raises library-missing, key-invalid, signature-missing, signature-wrong."""
    trusted, signature = public_keys(keys), read(bundle)
    if signature is None:
        raise BundleError("signature-missing", f"{SIGNATURE}: missing: the bundle is not signed")
    key = signature.key.hex()[:16]
    if signature.key not in trusted:
        names = " or ".join([f"{one.hex()[:16]}..." for one in trusted[:4]]) + (" or another" if len(trusted) > 4 else "")
        raise BundleError("signature-wrong", f"{SIGNATURE}: signed with key {key}..., expected {names}")
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519().Ed25519PublicKey.from_public_bytes(signature.key).verify(signature.signature, bundle.text)
    except InvalidSignature:
        raise BundleError("signature-wrong", f"{SIGNATURE}: key {key}... did not sign this manifest") from None
    return signature


def public_keys(keys: Keys) -> tuple[bytes, ...]:
    """The keys, 32 bytes each. Raises library-missing, key-invalid."""
    ed25519()
    several = [keys] if isinstance(keys, str | bytes | os.PathLike) or not isinstance(keys, Iterable) else list(keys)
    if not several:
        raise CallError("key-invalid", "key: expected at least one key, got an empty list")
    return tuple([_public_key(key) for key in several])


def _public_key(source: Key) -> bytes:
    if isinstance(source, bytes):
        key, name = source, f"a key of {len(source)} bytes"
    elif isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        digits = len(name) == 2 * KEY_BYTES and set(name) <= set("0123456789abcdefABCDEF")
        key = bytes.fromhex(name) if digits else _of_pem(name)
    else:
        raise CallError("key-invalid", f"key: expected a path, 64 hexadecimal digits or 32 bytes, got {type(source).__name__}")
    if len(key) != KEY_BYTES or key[:-1] + bytes([key[-1] & 0x7F]) in FORGEABLE:
        raise CallError("key-invalid", f"{name}: not an ed25519 public key")
    return key


def _of_pem(path: str) -> bytes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problem = f"{path[:200]}: not a key of 64 hexadecimal digits, and not a readable file: {reason}"
        raise CallError("key-invalid", problem) from None
    if b"PRIVATE KEY-----" in text:
        raise CallError("key-invalid", f"{path}: a private key, expected the public key", PUBLIC)
    try:
        key = load_pem_public_key(text if len(text) <= MAX_BYTES and text.count(b"-----BEGIN ") == 1 else b"")
    except (ValueError, UnsupportedAlgorithm):
        raise CallError("key-invalid", f"{path}: not a PEM file with one public key") from None
    if not isinstance(key, ed25519().Ed25519PublicKey):
        raise CallError("key-invalid", f"{path}: a key, but not an ed25519 key", "openssl genpkey -algorithm ed25519 makes one")
    raw: bytes = key.public_bytes_raw()
    return raw
