"""Manifest <-> canonical JSON.

Equal manifests give equal bytes: keys sorted, no spaces, one line per field of the manifest so that `diff` reads well.  The extra
key `sha256` holds the hash of the whole text with that hash's own digits as zeros, so that no byte can change unseen.  Decoding is
driven by the annotations in `schema.py` and fails with the path of the offending field, such as
`programs[2].values[0].dtype: expected str, got int`.  An earlier format version lacks the fields that `versions.ADDED` names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from math import isfinite
from typing import Any

from ..errors import BundleError
from . import json_text, limits, schema, versions
from .json_text import brief, expected, invalid, name, text, whole
from .size_expressions import OPERATORS

SEAL = "sha256"
"""The key of the manifest's own hash."""

Decoder = Callable[[Any, str], Any]


def bundle_bytes(manifest: schema.Manifest) -> int:
    """Bytes of all files of a bundle, its manifest's among them."""
    return sum(file.bytes for file in manifest.files) + len(encode(manifest))


def encode(manifest: schema.Manifest) -> bytes:
    """Canonical JSON of `manifest` in its own format version, UTF-8, ending with a newline.  Raises manifest-invalid for what that
    version cannot hold."""
    plain = _plain(manifest, manifest.format) | {SEAL: "0" * 64}
    lines = [f"{json.dumps(field)}:{json.dumps(plain[field], sort_keys=True, separators=(',', ':'))}" for field in sorted(plain)]
    text = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    return text.replace(_seal("0" * 64), _seal(hashlib.sha256(text).hexdigest()))


def decode(data: bytes) -> schema.Manifest:
    """The manifest in `data`.  Raises manifest-invalid or format-unsupported; checks types only: `validate/` has the rest."""
    try:
        plain = json_text.parse(data)
    except ValueError as error:
        raise BundleError("manifest-invalid", f"manifest.json: {error}") from None
    if not isinstance(plain, dict):
        raise BundleError("manifest-invalid", f"manifest.json: expected an object, got {type(plain).__name__}")
    version = plain.get("format")
    if type(version) is not int or not 1 <= version < limits.INTEGER:
        raise BundleError("manifest-invalid", f"format: expected a version number, got {brief(version)}")
    if version > versions.FORMAT_VERSION:
        raise BundleError(
            "format-unsupported",
            f"format: the bundle has format version {version}, this cgbundle reads versions up to {versions.FORMAT_VERSION}",
        )
    seal = plain.pop(SEAL, None)
    if type(seal) is not str or not seal.isascii() or data.count(_seal(seal)) != 1:
        raise BundleError("manifest-invalid", f"{SEAL}: missing")
    if hashlib.sha256(data.replace(_seal(seal), _seal("0" * 64))).hexdigest() != seal:
        raise BundleError("manifest-invalid", "manifest.json: its SHA-256 differs from the one it states")
    manifest: schema.Manifest = _record(schema.Manifest, version)(plain, "")
    return manifest


def _seal(digest: str) -> bytes:
    return f'\n"{SEAL}":"{digest}"'.encode()


def _plain(value: Any, version: int) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        found = {}
        for field in fields(value):
            since, before = _added(type(value), field.name)
            item = getattr(value, field.name)
            if (type(value).__name__, field.name) in versions.SPARSE and item == before:
                continue
            if version >= since:
                found[field.name] = _plain(item, version)
            elif item != before:
                raise BundleError("manifest-invalid", f"{field.name}: format version {version} has no such field")
        return found
    if isinstance(value, tuple | list):
        return [_plain(item, version) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, version) for key, item in value.items()}
    if isinstance(value, float) and not isfinite(value):
        raise BundleError("manifest-invalid", f"the manifest cannot hold the number {value}")
    return value


def _added(kind: type, field: str) -> tuple[int, Any]:
    """The format version from which on a record has a field, and what it is before."""
    return versions.ADDED.get((kind.__name__, field), (1, None))


# --- decoders, built once per process and format version from the annotations -------------------------------------


def _scalar(kind: type, word: str) -> Decoder:
    def decoder(value: Any, where: str) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int and abs(value) < 1 << 1023:
            return float(value)
        raise expected(where, word, value)

    return decoder


def _size(value: Any, where: str) -> Any:
    """A schema.Size."""
    return _operand(value, where, 0, [limits.SIZE_OPERATORS])


def _operand(value: Any, where: str, depth: int, left: list[int]) -> Any:
    """`left` is how many operators more the size may have, in a list that its parts share."""
    if type(value) is int:
        return whole(value, where)
    if type(value) is str:
        return name(value, where)
    if type(value) is list and len(value) == 3 and type(value[0]) is str and value[0] in OPERATORS:
        left[0] -= 1
        if depth >= limits.SIZE_DEPTH or left[0] < 0:
            reason = "nested too deeply" if left[0] >= 0 else f"more than {limits.SIZE_OPERATORS} operators"
            raise invalid(where.split("][")[0].rstrip("]") + "]", reason)  # at the size's own path, which ends with its axis
        return (value[0], *[_operand(value[side], f"{where}[{side}]", depth + 1, left) for side in (1, 2)])
    raise expected(where, "a size", value)


def _axes(listed: Decoder) -> Decoder:
    def decoder(value: Any, where: str) -> Any:
        if type(value) is list and len(value) > limits.AXES:
            raise invalid(where, f"{len(value)} axes, more than the limit of {limits.AXES}")
        return listed(value, where)

    return decoder


def _numbers(value: Any, where: str) -> tuple[int, ...]:
    """As a list of `whole` numbers, all at once: a manifest consists of these, most of all."""
    if type(value) is list and (not value or ({*map(type, value)} == _INT and min(value) >= -_END and max(value) < _END)):
        return tuple(value)
    made: tuple[int, ...] = _list(whole)(value, where)
    return made


_INT, _END = {int}, limits.INTEGER


def _list(item: Decoder) -> Decoder:
    def decoder(value: Any, where: str) -> Any:
        if type(value) is not list:
            raise expected(where, "a list", value)
        return tuple([item(element, f"{where}[{index}]") for index, element in enumerate(value)])

    return decoder


def _fixed(items: tuple[Decoder, ...]) -> Decoder:
    def decoder(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) != len(items):
            raise expected(where, f"{len(items)} values", value)
        return tuple([item(element, f"{where}[{index}]") for index, (item, element) in enumerate(zip(items, value, strict=True))])

    return decoder


@cache
def _record(kind: type, version: int) -> Decoder:
    added = {field.name: _added(kind, field.name) for field in fields(kind)}
    members = {field.name: _annotation(str(field.type), version) for field in fields(kind) if added[field.name][0] <= version}
    lacking = {field: before for field, (since, before) in added.items() if since > version}
    sparse = {field: added[field][1] for field in members if (kind.__name__, field) in versions.SPARSE}

    def decoder(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise expected(where, kind.__name__, value)
        prefix = f"{where}." if where else ""
        absent = sparse if not sparse else {field: before for field, before in sparse.items() if field not in value}
        if value.keys() != members.keys() - absent.keys():
            missing = sorted(members.keys() - value.keys() - absent.keys())
            unknown = sorted(value.keys() - members.keys())
            if missing:
                raise BundleError("manifest-invalid", f"{prefix}{missing[0]}: missing")
            field = unknown[0][:40] if unknown[0].isidentifier() else repr(unknown[0][:40])
            raise BundleError("manifest-invalid", f"{prefix}{field}: no such field in this format version")
        found = {field: member(value[field], prefix + field) for field, member in members.items() if field not in absent}
        for field, before in sparse.items():
            if found.get(field) == before:
                raise BundleError("manifest-invalid", f"{prefix}{field}: stands there, and is empty")
        return kind(**lacking, **absent, **found)

    return decoder


def _annotation(text: str, version: int) -> Decoder:
    """The decoder for an annotation as it is spelled in schema.py, where no tuple of fixed length holds another."""
    if text in _SCALARS:
        return _SCALARS[text]
    if text.startswith("tuple[") and text.endswith(", ...]"):
        return _list(_annotation(text[len("tuple[") : -len(", ...]")], version))
    if text.startswith("tuple[") and text.endswith("]"):
        return _fixed(tuple(_annotation(part, version) for part in text[len("tuple[") : -1].split(", ")))
    return _record(getattr(schema, text), version)


_SCALARS: dict[str, Decoder] = {
    "int": whole,
    "str": text,
    "Name": name,
    "bool": _scalar(bool, "bool"),
    "float": _scalar(float, "number"),
    "IntKey": _numbers,
    "tuple[int, ...]": _numbers,
    "Shape": _axes(_numbers),
    "Sizes": _axes(_list(_size)),
    "Tree": _scalar(dict, "an object"),  # `pytree.check` looks inside
}
