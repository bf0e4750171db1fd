"""Numbers, names and texts of a manifest, as the standard library's JSON gives them: their types and limits, and their errors."""

from __future__ import annotations

from typing import Any

from ..errors import BundleError
from . import limits


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
