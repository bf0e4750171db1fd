"""Limits of a bundle's parts, listed in FORMAT.md, and untrusted JSON within them. The limits are far above the values of real
bundles. A hostile bundle is refused within a second and 300 MB."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import accumulate
from math import isfinite
from typing import Any, NoReturn

from ..errors import BundleError

JSON_BYTES = 32 << 20  # of manifest.json, and of a safetensors header: 10,000 int_keys, or 100,000 tensors, need half of it
JSON_VALUES = 1_500_000  # commas, objects and lists in such a text: they determine how much memory its values take
JSON_DEPTH = 256  # objects and lists inside each other: a tree of `TREE_DEPTH` has three per level
TREE_DEPTH = 64  # containers of a tree inside each other
TREE_FIELDS = 4096  # of a named tuple or a record
SIZE_DEPTH = 64  # operators of a size inside each other
SIZE_OPERATORS = 256  # of one size
SIZE_EVALUATIONS = 4_000_000  # sizes and operators of all inputs and outputs, times the int_keys, of all entries
AXES = 64  # of a tensor, as in PyTorch
DIMENSIONS = 64  # of an entry
VARIANTS = 32
ENTRIES = 64
CHAINED = 1_000_000  # of all donations: their programs, and the pairs of programs that they connect
INTEGER = 1 << 63  # whole numbers are in [-INTEGER, INTEGER); also bytes of a tensor, and its end
NAME = 1024  # printable characters of a name or path
PATH_PART = 255  # bytes between the slashes of a path
TEXT = 65536  # characters of other text: messages, reasons, sources, constants
STATE_ROWS = (1 << 31) - 1  # rows of state: 32-bit positions reach all of them
TABLE_BYTES = 64 << 20  # of a recording or of the module states
TABLE_ROWS = 1 << 20  # every count of rows in a table; symbols and contents are limited by TABLE_BYTES
BODY_DEPTH = 64  # bodies of conditional nodes inside each other
HELD_BYTES = 256 << 20  # of another file that is kept in memory: a kernel image, a shared object


# --- untrusted JSON -------------------------------------------------------------------------------------------------------
#
# Size, number of values and depth are checked on the bytes first: the standard parser recurses without limit, and needs up to 25
# bytes for a byte of text.

_KEPT = b'[]{}"'
_OTHERS = bytes(set(range(256)) - set(_KEPT))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

_DIGITS = 4300
"""Python reads no longer integers, because that takes quadratic time; programs can switch this limit off."""


def parse(data: bytes) -> Any:
    """Parses UTF-8 JSON with finite numbers and distinct names in each object: readers treat duplicates differently. Raises
    ValueError with a one-line message for any other text, or one above the"""
    if len(data) > JSON_BYTES:
        raise ValueError(f"more than the limit of {JSON_BYTES} bytes")
    if data.count(b",") + data.count(b"[") + data.count(b"{") > JSON_VALUES:
        raise ValueError(f"more than the limit of {JSON_VALUES} values")
    if depth(data) > JSON_DEPTH:
        raise ValueError(f"nested too deeply: more than {JSON_DEPTH} objects and lists inside each other")

    def reject(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not allowed")

    def finite(digits: str) -> float:
        number = float(digits)
        return number if isfinite(number) else reject(digits[:40])

    def limited(digits: str) -> int:
        if len(digits) > _DIGITS:
            raise ValueError(f"Exceeds {_DIGITS} digits")
        return int(digits)

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            [(name, _)] = Counter([name for name, _ in pairs]).most_common(1)
            raise ValueError(f"{name[:40]!r} occurs twice in an object")
        return members

    integer = None if 0 < sys.get_int_max_str_digits() <= _DIGITS else limited
    try:
        text = str(data, "utf-8")
        return json.loads(text, parse_constant=reject, parse_float=finite, parse_int=integer, object_pairs_hook=distinct)
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("the caller's stack leaves too little room to read it") from None
    except ValueError as error:
        long = str(error).startswith("Exceeds")  # the rest of Python's message is advice for programmers
        raise ValueError(f"not JSON: {f'a number of more than {_DIGITS} digits' if long else error}") from None


def depth(data: bytes) -> int:
    """The largest nesting depth; above the limit for too many brackets and quotes. Takes a tenth of the time of parsing."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = data.translate(None, _OTHERS).replace(b'""', b"")  # removes texts without brackets
    if len(brackets) > 2 * JSON_VALUES:
        return JSON_VALUES + 1
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
    if type(value) is int and abs(value) >= INTEGER:
        return f"of {value.bit_length()} bits"
    return repr(str(value)[:40])


def is_sha256(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def whole(value: Any, where: str) -> int:
    """Returns `value` if it is a 64-bit integer. Raises manifest-invalid, like the functions below."""
    if type(value) is int and -INTEGER <= value < INTEGER:
        return value
    raise expected(where, "an integer of 64 bits" if type(value) is int else "int", value)


def name(value: Any, where: str) -> str:
    if type(value) is str and len(value) <= NAME and value.isprintable():
        return value
    if type(value) is not str:
        raise expected(where, "str", value)
    long = f"{len(value)} characters, more than the limit of {NAME}"
    raise invalid(where, long if len(value) > NAME else f"{value!r} is not printable")


def text(value: Any, where: str) -> str:
    """Returns `value` if it is text that UTF-8 can encode."""
    if type(value) is not str:
        raise expected(where, "str", value)
    if reason := text_reason(value):
        raise invalid(where, reason)
    return value


def text_reason(value: str) -> str:
    """Why the manifest cannot hold a text, or ""."""
    if len(value) > TEXT:
        return f"{len(value)} characters, more than the limit of {TEXT}"
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        return "holds half of a surrogate pair"
    return ""
