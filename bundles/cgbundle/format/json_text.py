"""JSON that nobody vouches for: its length, its number of values and its depth are seen from the bytes, before it is parsed.  No
name occurs twice in an object: readers differ in which one they take.
And the numbers, names and texts in a manifest: their types and limits, and their errors.

The parser of the standard library makes 25 bytes of objects from one byte of text, and goes as deep as the stack or beyond it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import accumulate
from math import isfinite
from typing import Any, NoReturn

from ..errors import BundleError
from . import limits

_KEPT = b'[]{}"'
_OTHERS = bytes(set(range(256)) - set(_KEPT))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

DIGITS = 4300
"""Digits beyond which Python refuses to read a number: that takes quadratic time.  A program may have set it off."""


def parse(data: bytes) -> Any:
    """The value of UTF-8 JSON whose numbers are finite and whose objects have each name once.  Raises ValueError, its message a
    line, for what is no such text or beyond the limits."""
    if len(data) > limits.JSON_BYTES:
        raise ValueError(f"more than the limit of {limits.JSON_BYTES} bytes")
    if data.count(b",") + data.count(b"[") + data.count(b"{") > limits.JSON_VALUES:
        raise ValueError(f"more than the limit of {limits.JSON_VALUES} values")
    if depth(data) > limits.JSON_DEPTH:
        raise ValueError(f"nested too deeply: more than {limits.JSON_DEPTH} objects and lists inside each other")
    limited = None if 0 < sys.get_int_max_str_digits() <= DIGITS else _whole
    try:
        return json.loads(
            str(data, "utf-8"), parse_constant=_reject, parse_float=_finite, parse_int=limited, object_pairs_hook=_distinct
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("the caller's stack leaves too little room to read it") from None
    except ValueError as error:
        long = str(error).startswith("Exceeds")  # the advice that follows is not for whoever reads a bundle
        raise ValueError(f"not JSON: {f'a number of more than {DIGITS} digits' if long else error}") from None


def depth(data: bytes) -> int:
    """How many objects and lists of a JSON text lie inside each other at the most, or one more than the limit on values where its
    brackets cannot be those of such a text.  Takes a tenth of the time of parsing."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    left = data.translate(None, _OTHERS).replace(b'""', b"")  # texts without brackets vanish; which brackets lie in texts stays
    if len(left) > 2 * limits.JSON_VALUES:
        return limits.JSON_VALUES + 1
    if b'"' in left:
        left = b"".join(left.split(b'"')[::2])
    return max(accumulate(map(_STEPS.__getitem__, left)), default=0)


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not allowed")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if isfinite(number) else _reject(digits[:40])


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        [(name, _)] = Counter([name for name, _ in pairs]).most_common(1)
        raise ValueError(f"{name[:40]!r} occurs twice in an object")
    return members


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"Exceeds {DIGITS} digits")
    return int(digits)


# --- numbers, names and texts of a manifest --------------------------------------------------------------------------


def expected(where: str, kind: str, got: Any) -> BundleError:
    """The error for a value at `where`, its path in the manifest, that is of another kind."""
    return invalid(where, f"expected {kind}, got {type(got).__name__} {brief(got)}")


def invalid(where: str, message: str) -> BundleError:
    """The error for a defect at `where`."""
    return BundleError("manifest-invalid", f"{where or 'manifest'}: {message}")


def brief(value: Any) -> str:
    """A value of JSON for a message: as it is where it is short, however large or deep it is."""
    if isinstance(value, list | dict):
        return f"of {len(value)}"
    if type(value) is int and abs(value) >= limits.INTEGER:
        return f"of {value.bit_length()} bits"
    return repr(str(value)[:40])


def is_sha256(text: str) -> bool:
    """Whether it is a SHA-256 in lower-case hexadecimal."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def whole(value: Any, where: str) -> int:
    """`value`, when it is an integer of 64 bits.  Raises manifest-invalid, as the others."""
    if type(value) is int and -limits.INTEGER <= value < limits.INTEGER:
        return value
    raise expected(where, "an integer of 64 bits" if type(value) is int else "int", value)


def name(value: Any, where: str) -> str:
    """`value`, when it is a `schema.Name`."""
    if type(value) is str and len(value) <= limits.NAME and value.isprintable():
        return value
    if type(value) is not str:
        raise expected(where, "str", value)
    long = f"{len(value)} characters, more than the limit of {limits.NAME}"
    raise invalid(where, long if len(value) > limits.NAME else f"{value!r} is not printable")


def text(value: Any, where: str) -> str:
    """`value`, when it is text for people: any characters that UTF-8 has."""
    if type(value) is not str:
        raise expected(where, "str", value)
    if reason := text_reason(value):
        raise invalid(where, reason)
    return value


def text_reason(value: str) -> str:
    """Why a text cannot stand in a manifest, or ""."""
    if len(value) > limits.TEXT:
        return f"{len(value)} characters, more than the limit of {limits.TEXT}"
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        return "holds half of a surrogate pair"
    return ""
