"""The public keys that a caller trusts: files as `openssl pkey -pubout` writes them, or the 32 bytes themselves."""

from __future__ import annotations

import binascii
import os
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from ..errors import CallError
from . import ed25519

Key: TypeAlias = str | os.PathLike[str] | bytes
"""The path of a PEM file, 64 hexadecimal digits, or 32 bytes."""

Keys: TypeAlias = Key | Sequence[Key]
"""Public keys that are trusted: the path of a PEM file, 64 hexadecimal digits, or 32 bytes; or several of these."""

BEGIN, END = b"-----BEGIN PUBLIC KEY-----", b"-----END PUBLIC KEY-----"

PREFIX = bytes.fromhex("302a300506032b6570032100")
"""A SubjectPublicKeyInfo for ed25519 up to the key's own bytes (RFC 8410, section 4)."""

MAX_BYTES = 16 << 10
"""Of a PEM file: a key takes 113, the rest may be remarks."""

PUBLIC = "openssl pkey -in PRIVATE.pem -pubout -out PUBLIC.pem, and give PUBLIC.pem: machines that only check need no private key"


def public_keys(given: Keys) -> tuple[bytes, ...]:
    """The keys, 32 bytes each.  Raises key-invalid, also where none is given."""
    if not isinstance(given, str | bytes | os.PathLike | Iterable):
        raise CallError("key-invalid", f"key: expected a path, 64 hexadecimal digits or 32 bytes, got {type(given).__name__}")
    several = [given] if isinstance(given, str | bytes | os.PathLike) else list(given)
    if not several:
        raise CallError("key-invalid", "key: an empty list of keys, which no bundle can be signed by")
    return tuple([_public_key(each) for each in several])


def _public_key(given: Key) -> bytes:
    if isinstance(given, bytes):
        key, name = given, f"a key of {len(given)} bytes"
    elif isinstance(given, str | os.PathLike):
        name = os.fspath(given)
        key = _digits(name) or _of_pem(name)
    else:
        raise CallError("key-invalid", f"key: expected a path, 64 hexadecimal digits or 32 bytes, got {type(given).__name__}")
    if not ed25519.is_key(key):
        raise CallError("key-invalid", f"{name}: no public key of ed25519")
    return key


def _digits(text: str) -> bytes | None:
    if len(text) != 2 * ed25519.KEY_BYTES or not set(text) <= set("0123456789abcdefABCDEF"):
        return None
    return bytes.fromhex(text)


def _of_pem(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero in it
        told = error.strerror if isinstance(error, OSError) else str(error)
        raise CallError("key-invalid", f"{path[:200]}: no key of 64 hexadecimal digits, and as a file: {told}") from None
    if b"PRIVATE KEY-----" in text:
        raise CallError("key-invalid", f"{path}: a private key, where the public one is enough", PUBLIC)
    rest = text.partition(BEGIN)[2]
    body, end, _ = rest.partition(END)
    if len(text) > MAX_BYTES or not end or BEGIN in rest:
        raise CallError("key-invalid", f"{path}: no PEM file with one public key")
    try:
        data = binascii.a2b_base64(b"".join(body.split()), strict_mode=True)
    except binascii.Error as error:
        raise CallError("key-invalid", f"{path}: no PEM file: {error}") from None
    if len(data) != len(PREFIX) + ed25519.KEY_BYTES or not data.startswith(PREFIX):
        raise CallError("key-invalid", f"{path}: a key, but none of ed25519", "openssl genpkey -algorithm ed25519 makes one")
    return data[len(PREFIX) :]
