"""Encodes a manifest as canonical JSON, and describes files.  `cgbundle/format/manifest_json.py` documents and reads it."""

from __future__ import annotations

import hashlib
import json
import os
from math import isfinite
from typing import Any

from cgbundle.errors import BundleError
from cgbundle.format import schema
from cgbundle.format.file_names import MANIFEST, SIGNATURE
from cgbundle.format.manifest_json import SEAL, VARIANTS, seal_line
from cgbundle.format.records import defaults, is_record, members
from cgbundle.process import CHUNK


def bundle_bytes(manifest: schema.Manifest) -> int:
    """Returns the bytes of all files of a bundle, including the manifest."""
    return sum(file.bytes for file in manifest.files) + len(encode(manifest))


def encode(manifest: schema.Manifest, *others: schema.Manifest) -> bytes:
    """Encodes a manifest, or several variants in this order, as canonical JSON: UTF-8, with a newline at the end.  Raises
    manifest-invalid for a number that JSON cannot represent."""
    common, rests = _common([_plain(variant) for variant in (manifest, *others)])
    plain = common | {SEAL: "0" * 64} | ({VARIANTS: rests} if others else {})
    lines = [f"{json.dumps(field)}:{json.dumps(plain[field], sort_keys=True, separators=(',', ':'))}" for field in sorted(plain)]
    text = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    return text.replace(seal_line("0" * 64), seal_line(hashlib.sha256(text).hexdigest()))


def _common(values: list[Any]) -> tuple[Any, list[Any]]:
    """Returns the common part of all values, and the remaining part of each value.  The value `...` means that a part is empty."""
    first = values[0]
    if len({json.dumps(value, sort_keys=True) for value in values}) == 1:  # not with ==: 1, 1.0 and True are equal
        return first, [...] * len(values)
    if all(type(value) is dict for value in values):
        common: dict[str, Any] = {}
        rests: list[dict[str, Any]] = [{} for _ in values]
        for key in dict.fromkeys(key for value in values for key in value):
            has_key = [key in value for value in values]
            items = [value.get(key, ...) for value in values]
            shared, remainders = _common(items) if all(has_key) else (..., items)
            common |= {} if shared is ... else {key: shared}
            for rest, item in zip(rests, remainders, strict=True):
                rest |= {} if item is ... else {key: item}
        return common, [rest or ... for rest in rests]
    if all(type(value) is list and len(value) == len(first) and {*map(type, value)} == {dict} for value in values):
        parts = [_common(list(items)) for items in zip(*values, strict=True)]
        rests_by_value = [[{} if leftovers[at] is ... else leftovers[at] for _, leftovers in parts] for at in range(len(values))]
        return [common for common, _ in parts], [rest if any(rest) else ... for rest in rests_by_value]
    return ..., list(values)


def _plain(value: Any) -> Any:
    """Converts a value of a record to types that JSON supports.  Fields that equal their default are omitted."""
    if is_record(value):
        absent, rows = defaults(type(value)), [(field, getattr(value, field)) for field in members(type(value))]
        return {field: _plain(item) for field, item in rows if field not in absent or item != absent[field]}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not isfinite(value):
        raise BundleError("manifest-invalid", f"the manifest cannot hold the number {value}")
    return value


def sha256(path: str) -> str:
    """Returns the hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def list_files(path: str) -> list[str]:
    """Lists all files below `path` as relative paths with forward slashes, sorted."""
    return sorted(
        os.path.relpath(os.path.join(folder, name), path).replace(os.sep, "/")
        for folder, _, names in os.walk(path)
        for name in names
    )


def describe_files(path: str) -> tuple[schema.File, ...]:
    """Returns the manifest's rows for all files below `path`, except the manifest and its signature."""
    return tuple([describe_file(path, name) for name in list_files(path) if name not in (MANIFEST, SIGNATURE)])


def describe_file(path: str, name: str) -> schema.File:
    """Returns the manifest's row for a file below `path`."""
    full = os.path.join(path, name)
    return schema.File(path=name, bytes=os.stat(full).st_size, sha256=sha256(full))
