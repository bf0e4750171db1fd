"""Reads untrusted JSON. Size, number of values and depth are checked on the bytes first: the standard parser recurses without
limit, and needs up to 25 bytes for a byte of text. Also checks the numbers, names and texts of a manifest."""

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
"""Python reads no longer integers, because that takes quadratic time; programs can switch this limit off."""


def parse(data: bytes) -> Any:
    """Parses UTF-8 JSON with finite numbers and distinct names in each object: readers treat duplicates differently. Raises
    ValueError with a one-line message for any other text, or one above the limits."""
    if len(data) > limits.JSON_BYTES:
        raise ValueError(f"more than the limit of {limits.JSON_BYTES} bytes")
    if data.count(b",") + data.count(b"[") + data.count(b"{") > limits.JSON_VALUES:
        raise ValueError(f"more than the limit of {limits.JSON_VALUES} values")
    if depth(data) > limits.JSON_DEPTH:
        raise ValueError(f"nested too deeply: more than {limits.JSON_DEPTH} objects and lists inside each other")

    def reject(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not allowed")

    def finite(digits: str) -> float:
        number = float(digits)
        return number if isfinite(number) else reject(digits[:40])

    def limited(digits: str) -> int:
        if len(digits) > DIGITS:
            raise ValueError(f"Exceeds {DIGITS} digits")
        return int(digits)

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            [(name, _)] = Counter([name for name, _ in pairs]).most_common(1)
            raise ValueError(f"{name[:40]!r} occurs twice in an object")
        return members

    integer = None if 0 < sys.get_int_max_str_digits() <= DIGITS else limited
    try:
        text = str(data, "utf-8")
        return json.loads(text, parse_constant=reject, parse_float=finite, parse_int=integer, object_pairs_hook=distinct)
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("the caller's stack leaves too little room to read it") from None
    except ValueError as error:
        long = str(error).startswith("Exceeds")  # the rest of Python's message is advice for programmers
        raise ValueError(f"not JSON: {f'a number of more than {DIGITS} digits' if long else error}") from None


def depth(data: bytes) -> int:
    """The largest nesting depth; above the limit for too many brackets and quotes. Takes a tenth of the time of parsing."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = data.translate(None, _OTHERS).replace(b'""', b"")  # removes texts without brackets
    if len(brackets) > 2 * limits.JSON_VALUES:
        return limits.JSON_VALUES + 1
    if b'"' in brackets:
        brackets = b"".join(brackets.split(b'"')[::2])
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


# --- numbers, names and texts of a manifest --------------------------------------------------------------------------


def expected(where: str, kind: str, got: Any) -> BundleError:
    """The error for a value of another kind at `where`, its path in the manifest."""
    return invalid(where, f"expected {kind}, got {type(got).__name__} {brief(got)}")


def invalid(where: str, message: str) -> BundleError:
    return BundleError("manifest-invalid", f"{where or 'manifest'}: {message}")


def brief(value: Any) -> str:
    """A JSON value for a message, shortened."""
    if isinstance(value, list | dict):
        return f"of {len(value)}"
    if type(value) is int and abs(value) >= limits.INTEGER:
        return f"of {value.bit_length()} bits"
    return repr(str(value)[:40])


def is_sha256(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def whole(value: Any, where: str) -> int:
    """Returns `value` if it is a 64-bit integer. Raises manifest-invalid, like the functions below."""
    if type(value) is int and -limits.INTEGER <= value < limits.INTEGER:
        return value
    raise expected(where, "an integer of 64 bits" if type(value) is int else "int", value)


def name(value: Any, where: str) -> str:
    if type(value) is str and len(value) <= limits.NAME and value.isprintable():
        return value
    if type(value) is not str:
        raise expected(where, "str", value)
    long = f"{len(value)} characters, more than the limit of {limits.NAME}"
    raise invalid(where, long if len(value) > limits.NAME else f"{value!r} is not printable")


def text(value: Any, where: str) -> str:
    """Returns `value` if it is text that UTF-8 can encode."""
    if type(value) is not str:
        raise expected(where, "str", value)
    if reason := text_reason(value):
        raise invalid(where, reason)
    return value


def text_reason(value: str) -> str:
    """Why the manifest cannot hold a text, or ""."""
    if len(value) > limits.TEXT:
        return f"{len(value)} characters, more than the limit of {limits.TEXT}"
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        return "holds half of a surrogate pair"
    return ""
