"""Public keys in the forms in which callers give them."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, ed448, x25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cgbundle.signatures import MAX_BYTES, public_keys
from tests.helpers.bundles.signing import Pair, pem
from tests.helpers.raising import raises

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key()
RAW = KEY.public_bytes_raw()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "key.pem"


def test_one_key_in_all_its_forms(file: Path) -> None:
    file.write_bytes(pem(KEY))
    for key in (RAW, RAW.hex(), RAW.hex().upper(), file, str(file)):
        assert public_keys(key) == (RAW,)
    assert public_keys([RAW, file, RAW.hex()]) == (RAW, RAW, RAW)


def test_remarks_and_line_ends_of_a_pem_file(file: Path) -> None:
    text = pem(KEY).replace(b"\n", b"\r\n")
    file.write_bytes(b"the key of 2026\n" + text + b"\nmore\n")
    assert public_keys(file) == (RAW,)


def test_a_key_from_a_pipe(tmp_path: Path) -> None:
    """The shell's <(...) gives such a pipe."""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(pem(KEY),))
    writer.start()
    assert public_keys(tmp_path / "pipe") == (RAW,)
    writer.join()


def test_a_private_key_is_refused_kindly(tmp_path: Path) -> None:
    pair = Pair.make(tmp_path)
    with raises("key-invalid", match="a private key, expected the public key") as caught:
        public_keys(pair.private)
    assert "openssl pkey" in caught.value.hint  # type: ignore[attr-defined]
    with raises("key-invalid", match="a private key"):
        public_keys([pair.public, pair.private])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not a PEM file with one public key"),
        (RAW, "not a PEM file with one public key"),
        (RAW.hex().encode(), "not a PEM file with one public key"),
        (pem(KEY) * 2, "not a PEM file with one public key"),
        (pem(KEY)[:-20], "not a PEM file with one public key"),
        (pem(KEY) + b"\n" * MAX_BYTES, "not a PEM file with one public key"),
        (pem(KEY).replace(b"M", b"?", 1), "not a PEM file with one public key"),
        (pem(KEY).replace(b"=", b""), "not a PEM file with one public key"),
        (pem(x25519.X25519PrivateKey.generate().public_key()), "a key, but not an ed25519 key"),
        (pem(ed448.Ed448PrivateKey.generate().public_key()), "a key, but not an ed25519 key"),
        (pem(ec.generate_private_key(ec.SECP256R1()).public_key()), "a key, but not an ed25519 key"),
    ],
    # names are needed: some keys are random, and every process of a run must collect the same tests
    ids=["empty", "raw", "hex", "two", "cut off", "too long", "damaged", "no padding", "x25519", "ed448", "p-256"],
)
def test_files_that_are_no_key(file: Path, text: bytes, message: str) -> None:
    file.write_bytes(text)
    with raises("key-invalid", match=f"key.pem: {message}"):
        public_keys(str(file))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ([], "got an empty list"),
        ((), "got an empty list"),
        (b"", "a key of 0 bytes: not an ed25519 public key"),
        (RAW + b"\0", "a key of 33 bytes"),
        (bytes(32), "a key of 32 bytes: not an ed25519 public key"),
        ("00" * 32, "0000: not an ed25519 public key"),
        ("", "not a readable file: No such file"),
        ("no/such/key.pem", "no/such/key.pem: not a key of 64 hexadecimal digits, and not a readable file: No such file"),
        (RAW.hex()[:-1], "not a readable file: No such file"),
        ("²" * 64, "not a readable file: "),
        ("a\0b", "not a readable file: embedded null byte"),
        ("x" * 5000, "not a readable file: File name too long"),
        (os.sep, "not a readable file: Is a directory"),
        ([RAW, 5], "expected a path, 64 hexadecimal digits or 32 bytes, got int"),
    ],
)
def test_what_is_no_key(key: object, message: str) -> None:
    with raises("key-invalid", match=message):
        public_keys(key)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key",
    [
        "01" + "00" * 31, "01" + "00" * 30 + "80", "00" * 32, "00" * 31 + "80", "ec" + "ff" * 30 + "7f", "ec" + "ff" * 31,
        "ed" + "ff" * 30 + "7f", "ee" + "ff" * 30 + "7f", "ee" + "ff" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
    ],
)  # fmt: skip
def test_a_key_with_which_anybody_can_sign_is_refused(key: str) -> None:
    """The order of this key divides 8: OpenSSL accepts the base point and 1 as a signature of every eighth message."""
    forged, public = (
        bytes.fromhex("58" + "66" * 31) + (1).to_bytes(32, "little"),
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)),
    )

    def accepted(number: int) -> bool:
        with suppress(InvalidSignature):
            public.verify(forged, b"%d" % number)
            return True
        return False

    assert any(map(accepted, range(200)))
    with raises("key-invalid", match="not an ed25519 public key"):
        public_keys(key)
