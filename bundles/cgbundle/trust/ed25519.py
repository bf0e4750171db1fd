"""Ed25519 signatures checked with the standard library alone (RFC 8032, section 5.1).

Only checking: no secret ever passes through this code, so its running time may depend on what it computes.  About 5 ms.

What is accepted is a subset of what every other implementation accepts: one spelling of every point and number (RFC 8032, 5.1.3 and
5.1.7), the equation without the cofactor, and no point of small order, under which one signature fits many messages.
"""

from __future__ import annotations

import hashlib

PRIME = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
"""Of the base point: the number of points that keys and signatures are multiples in."""

D = -121665 * pow(121666, -1, PRIME) % PRIME
ROOT = pow(2, (PRIME - 1) // 4, PRIME)
"""A square root of -1."""

Point = tuple[int, int, int, int]
"""Extended coordinates X, Y, Z, T with x = X/Z, y = Y/Z, xy = T/Z."""

ZERO: Point = (0, 1, 1, 0)

KEY_BYTES = 32
SIGNATURE_BYTES = 64


def is_key(key: bytes) -> bool:
    """Whether 32 bytes are a public key that `verify` may accept a signature of."""
    return len(key) == KEY_BYTES and _safe_point(key) is not None


def verify(key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` (64 bytes) is one of `message` by the owner of the public `key` (32 bytes)."""
    if len(key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    owner, commitment = _safe_point(key), _safe_point(signature[:32])
    scalar = int.from_bytes(signature[32:], "little")
    if owner is None or commitment is None or scalar >= ORDER:
        return False
    challenge = int.from_bytes(hashlib.sha512(signature[:32] + key + message).digest(), "little") % ORDER
    return _equal(_combined(scalar, _BASE, challenge, _minus(owner)), commitment)


def _safe_point(data: bytes) -> Point | None:
    """The point that 32 bytes stand for, or None: also for one of small order."""
    number = int.from_bytes(data, "little")
    sign, y = number >> 255, number & (2**255 - 1)
    x = _x_of(y, sign)
    if x is None:
        return None
    eighth = point = (x, y, 1, x * y % PRIME)
    for _ in range(3):
        eighth = _sum(eighth, eighth)
    return None if _equal(eighth, ZERO) else point


def _x_of(y: int, sign: int) -> int | None:
    """The x of a point on the curve -x^2 + y^2 = 1 + D x^2 y^2 whose lowest bit is `sign`, or None."""
    if y >= PRIME:
        return None
    square = (y * y - 1) * pow(D * y * y + 1, -1, PRIME) % PRIME
    if square == 0:
        return None if sign else 0
    x = pow(square, (PRIME + 3) // 8, PRIME)
    if (x * x - square) % PRIME:
        x = x * ROOT % PRIME
    if (x * x - square) % PRIME:
        return None
    return PRIME - x if (x & 1) != sign else x


def _sum(one: Point, other: Point) -> Point:
    """The sum of any two points: the formulas are complete."""
    a = (one[1] - one[0]) * (other[1] - other[0]) % PRIME
    b = (one[1] + one[0]) * (other[1] + other[0]) % PRIME
    c = 2 * one[3] * other[3] * D % PRIME
    d = 2 * one[2] * other[2] % PRIME
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % PRIME, g * h % PRIME, f * g % PRIME, e * h % PRIME


def _minus(point: Point) -> Point:
    return -point[0] % PRIME, point[1], point[2], -point[3] % PRIME


def _combined(a: int, one: Point, b: int, other: Point) -> Point:
    """a * one + b * other, bit by bit from the highest on."""
    terms = {("0", "1"): other, ("1", "0"): one, ("1", "1"): _sum(one, other)}
    found = ZERO
    for bits in zip(f"{a:0253b}", f"{b:0253b}", strict=True):
        found = _sum(found, found)
        if bits in terms:
            found = _sum(found, terms[bits])
    return found


def _equal(one: Point, other: Point) -> bool:
    return (one[0] * other[2] - other[0] * one[2]) % PRIME == 0 and (one[1] * other[2] - other[1] * one[2]) % PRIME == 0


_BASE_Y = 4 * pow(5, -1, PRIME) % PRIME
_BASE_X = _x_of(_BASE_Y, 0) or 0
_BASE: Point = (_BASE_X, _BASE_Y, 1, _BASE_X * _BASE_Y % PRIME)
