"""Checking of ed25519 signatures: the vectors of RFC 8032, everything that must be refused, and agreement with `cryptography`."""

from __future__ import annotations

import hashlib

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from cgbundle.trust.ed25519 import ORDER, PRIME, is_key, verify

VECTORS = {
    "1": (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    "2": (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    "3": (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
    "SHA(abc)": (
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        hashlib.sha512(b"abc").hexdigest(),
        "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b58909351fc9ac90b3ecfdfbc7c66431e0303dca179c138ac17ad9bef1177331a704",
    ),
}
"""RFC 8032, section 7.1: public key, message, signature."""

IDENTITY = "01" + "00" * 31
SMALL = {
    "identity": IDENTITY,
    "order 2": "ec" + "ff" * 30 + "7f",
    "order 4": "00" * 32,
    "order 4, other sign": "00" * 31 + "80",
    "order 8": "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "order 8, other sign": "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "order 8, other y": "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "order 8, other y and sign": "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
}
"""All points whose order divides 8."""

SPELLED_TWICE = {
    "y = p + 1, the identity": PRIME + 1,
    "y = p": PRIME,
    "y = 2^255 - 1": 2**255 - 1,
    "x = 0 with a sign": 1 + 2**255,
    "y = -1 with a sign": PRIME - 1 + 2**255,
    "y = p + 3, a point of large order": PRIME + 3,
}
"""Numbers of 256 bits that stand for a point which has another spelling."""

SEED = bytes(range(32))
MESSAGE = b"a manifest"


def key_of(seed: bytes = SEED) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(seed)


PUBLIC, SIGNED = key_of().public_key().public_bytes_raw(), key_of().sign(MESSAGE)


def spelled(number: int) -> bytes:
    return number.to_bytes(32, "little")


@pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)
def test_the_vectors_of_the_standard(vector: tuple[str, str, str]) -> None:
    key, message, signature = map(bytes.fromhex, vector)
    assert is_key(key) and verify(key, message, signature)
    assert not verify(key, message + b"\0", signature)
    for at in (0, 31, 32, 63):
        changed = bytearray(signature)
        changed[at] ^= 1
        assert not verify(key, message, bytes(changed))


def test_a_scalar_has_one_spelling() -> None:
    """S + L, S + 2L, ... satisfy the equation too (RFC 8032, 5.1.7)."""
    scalar = int.from_bytes(SIGNED[32:], "little")
    assert verify(PUBLIC, MESSAGE, SIGNED)
    for times in range(1, 16):
        if scalar + times * ORDER < 2**256:
            assert not verify(PUBLIC, MESSAGE, SIGNED[:32] + spelled(scalar + times * ORDER))
    assert not verify(PUBLIC, MESSAGE, SIGNED[:32] + bytes(32))
    assert not verify(PUBLIC, MESSAGE, SIGNED[:32] + spelled(ORDER))
    assert not verify(PUBLIC, MESSAGE, SIGNED[:32] + b"\xff" * 32)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 63, 65, 128])
def test_lengths(size: int) -> None:
    assert not verify(PUBLIC, MESSAGE, (SIGNED * 2)[:size])
    assert size == 32 or not is_key((PUBLIC * 4)[:size])
    assert size == 32 or not verify((PUBLIC * 4)[:size], MESSAGE, SIGNED)


@pytest.mark.parametrize("number", SPELLED_TWICE.values(), ids=SPELLED_TWICE)
def test_a_point_has_one_spelling(number: int) -> None:
    assert not is_key(spelled(number))
    assert not verify(spelled(number), MESSAGE, SIGNED)
    assert not verify(PUBLIC, MESSAGE, spelled(number) + SIGNED[32:])


def test_half_of_all_numbers_are_no_points() -> None:
    found = [is_key(spelled(number)) for number in range(2, 200)]
    assert 60 < sum(found) < 140


@pytest.mark.parametrize("point", SMALL.values(), ids=SMALL)
def test_a_key_of_small_order_signs_nothing(point: str) -> None:
    """With such a key anybody makes a signature of any message: R = S * base, where 8 divides the challenge."""
    key, base = bytes.fromhex(point), bytes.fromhex("58" + "66" * 31)
    assert not is_key(key)
    for number in range(16):
        assert not verify(key, b"%d" % number, base + spelled(1))


def test_a_signature_that_begins_with_a_point_of_small_order_is_none() -> None:
    """Its maker has the key, and gives a signature that fits more than one message of others' choice."""
    digest = hashlib.sha512(SEED).digest()
    secret = (int.from_bytes(digest[:32], "little") & ((1 << 254) - 8)) | (1 << 254)
    commitment = bytes.fromhex(IDENTITY)
    challenge = int.from_bytes(hashlib.sha512(commitment + PUBLIC + MESSAGE).digest(), "little") % ORDER
    assert not verify(PUBLIC, MESSAGE, commitment + spelled(challenge * secret % ORDER))


@settings(max_examples=40)
@given(seed=st.binary(min_size=32, max_size=32), message=st.binary(max_size=300), at=st.integers(0, 96 * 8 - 1))
def test_agreement_with_a_library(seed: bytes, message: bytes, at: int) -> None:
    """What is signed is accepted; with one bit of key or signature changed, what is accepted here is accepted there."""
    private = key_of(seed)
    both = private.public_key().public_bytes_raw() + private.sign(message)
    assert verify(both[:32], message, both[32:])
    changed = bytearray(both)
    changed[at // 8] ^= 1 << at % 8
    if verify(bytes(changed[:32]), message, bytes(changed[32:])):
        try:
            Ed25519PublicKey.from_public_bytes(bytes(changed[:32])).verify(bytes(changed[32:]), message)
        except InvalidSignature:
            pytest.fail("accepted here alone")
