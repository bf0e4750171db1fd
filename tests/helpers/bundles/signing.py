"""Pairs of ed25519 keys as PEM files, as openssl writes them, and files with a flipped bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A private and a public key as PEM files, and the public key as 64 hex digits."""

    private: Path
    public: Path
    digits: str

    @classmethod
    def make(cls, folder: Path, name: str = "key", key: Any = None, encryption: KeySerializationEncryption | None = None) -> Pair:
        """Writes a new pair to `folder`."""
        key = key or Ed25519PrivateKey.generate()
        private, public = folder / f"{name}.private.pem", folder / f"{name}.pem"
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption()))
        public.write_bytes(pem(key.public_key()))
        raw = key.public_key().public_bytes_raw() if isinstance(key, Ed25519PrivateKey) else b""
        return cls(private, public, raw.hex())


def pem(public: Any) -> bytes:
    """Returns a public key as `openssl pkey -pubout` writes it."""
    pem_bytes: bytes = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem_bytes


def flip(path: Path, at: int = -2) -> None:
    """Flips the lowest bit of the byte at offset `at`."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))
