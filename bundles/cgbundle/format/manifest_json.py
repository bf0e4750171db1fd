"""Decodes a manifest from canonical JSON, which `cgcompile/bundle/manifest_text.py` writes. FORMAT.md describes the text: its own
hash (`sha256`), defaults left out, and `variants`, which lists what each variant has besides the common members. Decoders follow
the annotations in `schema.py`; errors have the path of the field, such as `entries[0].programs[2].values[0].dtype: expected str,
got int`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from ..errors import BundleError
from ..format import limits, schema
from .limits import brief, expected, invalid, is_sha256, name, text, whole
from .records import defaults, members
from .shapes import OPERATORS

SEAL = "sha256"  # the key of the manifest's own hash
VARIANTS = "variants"  # the key of the list of members that differ between variants
Decoder = Callable[[Any, str], Any]
"""(JSON value, its path in the manifest) -> the value of a record's field."""


def decode(data: bytes) -> schema.Manifest:
    """The only manifest in `data`, or the first variant's. Raises as `Variants`."""
    return Variants(data).manifest(0)


class Variants:
    """The manifests in a text, decoded on demand. Raises manifest-invalid or format-unsupported. `validate/` checks what holds
    between fields."""

    __slots__ = ("_plain",)

    def __init__(self, data: bytes) -> None:
        try:
            plain = limits.parse(data)
        except ValueError as error:
            raise BundleError("manifest-invalid", f"manifest.json: {error}") from None
        if not isinstance(plain, dict):
            raise BundleError("manifest-invalid", f"manifest.json: expected an object, got {type(plain).__name__}")
        _check_version(plain)
        seal = plain.pop(SEAL, None)
        if type(seal) is not str or not seal.isascii() or data.count(seal_line(seal)) != 1:
            raise BundleError("manifest-invalid", f"{SEAL}: missing")
        if hashlib.sha256(data.replace(seal_line(seal), seal_line("0" * 64))).hexdigest() != seal:
            raise BundleError("manifest-invalid", "manifest.json: its SHA-256 differs from the one it states")
        rests = plain.pop(VARIANTS, None)
        if rests is not None and not (type(rests) is list and 2 <= len(rests) <= limits.VARIANTS):
            raise invalid(VARIANTS, f"expected a list of 2 to {limits.VARIANTS} objects, got {brief(rests)}")
        self._plain = [plain] if rests is None else [_joined(plain, rest, f"{VARIANTS}[{at}]") for at, rest in enumerate(rests)]

    def __len__(self) -> int:
        return len(self._plain)

    def manifest(self, number: int) -> schema.Manifest:
        manifest: schema.Manifest = _record(schema.Manifest)(self._plain[number], "")
        return manifest

    def targets(self) -> tuple[schema.Target, ...]:
        return tuple([_record(schema.Target)(plain.get("target"), "target") for plain in self._plain])


def _joined(common: Any, rest: Any, where: str) -> Any:
    if type(common) is dict and type(rest) is dict:
        both = {key: _joined(common[key], rest[key], f"{where}.{key[:40]}") for key in common.keys() & rest.keys()}
        return common | rest | both
    if type(common) is list and type(rest) is list and len(common) == len(rest):
        return [_joined(one, other, f"{where}[{at}]") for at, (one, other) in enumerate(zip(common, rest, strict=True))]
    raise invalid(where, "must be an object, or a list as long as the one that all variants share")


def _check_version(plain: dict[str, Any]) -> None:
    if "version" not in plain and "format" in plain:
        text = f"manifest.json: written before version {schema.VERSION} of the format; build the bundle again"
        raise BundleError("format-unsupported", text)
    version = plain.get("version")
    if type(version) is not int or not 1 <= version < limits.INTEGER:
        raise BundleError("manifest-invalid", f"version: expected a version number, got {brief(version)}")
    if version > schema.VERSION:
        text = f"version: the bundle has version {version} of the format, this cgbundle reads versions up to {schema.VERSION}"
        raise BundleError("format-unsupported", text)


def seal_line(digest: str) -> bytes:
    return f'\n"{SEAL}":"{digest}"'.encode()


# --- decoders, built once per process from the annotations --------------------------------------------------------


@cache
def _record(kind: type) -> Decoder:
    decoders = {field: _annotation(spelled) for field, spelled in members(kind).items()}
    absent = defaults(kind)

    def decoder(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise expected(where, kind.__name__, value)
        prefix = f"{where}." if where else ""
        if not decoders.keys() - absent.keys() <= value.keys() <= decoders.keys():
            if missing := sorted(decoders.keys() - value.keys() - absent.keys()):
                raise BundleError("manifest-invalid", f"{prefix}{missing[0]}: missing")
            unknown = min(value.keys() - decoders.keys())
            name = unknown[:40] if unknown.isidentifier() else repr(unknown[:40])
            raise BundleError("manifest-invalid", f"{prefix}{name}: no such field in this format version")
        fields = {field: decoders[field](item, prefix + field) for field, item in value.items()}
        for field, item in fields.items():
            if field in absent and item == absent[field] and type(item) is type(absent[field]):
                raise BundleError("manifest-invalid", f"{prefix}{field}: has its default value, which must be left out")
        return kind(**fields)

    return decoder


def _annotation(text: str) -> Decoder:
    """The decoder for an annotation of schema.py, where no fixed-length tuple contains another."""
    text = text.removesuffix(" | None")  # None is the default of such a field, and defaults are left out
    if text in _SCALARS:
        return _SCALARS[text]
    inside = text[text.find("[") + 1 : -1]
    if text.startswith("Literal["):
        return partial(_one_of, tuple([part.strip("'\"") for part in inside.split(", ")]))
    if text.startswith("tuple[") and text.endswith(", ...]"):
        return partial(_list, _annotation(inside.removesuffix(", ...")))
    if text.startswith("tuple["):
        return partial(_fixed, tuple([_annotation(part) for part in inside.split(", ")]))
    return _record(getattr(schema, text))


def _one_of(names: tuple[str, ...], value: Any, where: str) -> Any:
    if type(value) is str and value in names:
        return value
    raise expected(where, f"one of {', '.join(names)}", value)


def _of_type(kind: type, name: str, value: Any, where: str) -> Any:
    if type(value) is kind:
        return value
    raise expected(where, name, value)


def _not_negative(decode: Decoder, value: Any, where: str) -> Any:
    number = decode(value, where)
    if number >= 0:
        return number
    raise invalid(where, f"{number} is below 0")


def _number(value: Any, where: str) -> float:
    if type(value) is float:
        return value
    if type(value) is int and abs(value) < 1 << 1023:
        return float(value)
    raise expected(where, "number", value)


def _digest(value: Any, where: str) -> str:
    digest = name(value, where)
    if is_sha256(digest):
        return digest
    raise invalid(where, "is no SHA-256 in lower-case hexadecimal")


def _size(value: Any, where: str, depth: int = 0, budget: list[int] | None = None) -> Any:
    """`budget`: how many more operators the size may have, in a list that its parts share."""
    if type(value) is int:
        return whole(value, where)
    if type(value) is str:
        return name(value, where)
    if type(value) is list and len(value) == 3 and type(value[0]) is str and value[0] in OPERATORS:
        budget = [limits.SIZE_OPERATORS] if budget is None else budget
        budget[0] -= 1
        if depth >= limits.SIZE_DEPTH or budget[0] < 0:
            reason = "nested too deeply" if budget[0] >= 0 else f"more than {limits.SIZE_OPERATORS} operators"
            raise invalid(where.split("][")[0].rstrip("]") + "]", reason)  # the path of the whole size
        return (value[0], *[_size(value[side], f"{where}[{side}]", depth + 1, budget) for side in (1, 2)])
    raise expected(where, "a size", value)


def _axes(items: Decoder, value: Any, where: str) -> Any:
    if type(value) is list and len(value) > limits.AXES:
        raise invalid(where, f"{len(value)} axes, more than the limit of {limits.AXES}")
    return items(value, where)


def _numbers(value: Any, where: str) -> tuple[int, ...]:
    """Decodes a list of `whole` numbers at once: most of a manifest consists of these."""
    if type(value) is list and (not value or ({*map(type, value)} == _INT and min(value) >= -_END and max(value) < _END)):
        return tuple(value)
    return _list(whole, value, where)


_INT, _END = {int}, limits.INTEGER


def _list(item: Decoder, value: Any, where: str) -> tuple[Any, ...]:
    if type(value) is not list:
        raise expected(where, "a list", value)
    return tuple([item(element, f"{where}[{index}]") for index, element in enumerate(value)])


def _fixed(items: tuple[Decoder, ...], value: Any, where: str) -> tuple[Any, ...]:
    if type(value) is not list or len(value) != len(items):
        raise expected(where, f"{len(items)} values", value)
    return tuple([item(element, f"{where}[{index}]") for index, (item, element) in enumerate(zip(items, value, strict=True))])


_SCALARS: dict[str, Decoder] = {
    "int": whole, "float": _number, "bool": partial(_of_type, bool, "bool"), "str": text, "Name": name, "Sha256": _digest,
    "Position": partial(_not_negative, whole), "Bytes": partial(_not_negative, whole), "Error": partial(_not_negative, _number),
    "Dtype": partial(_one_of, tuple(schema.DTYPES)), "Memory": partial(_one_of, schema.MEMORIES),
    "IntKey": _numbers, "tuple[int, ...]": _numbers, "Shape": partial(_axes, _numbers),
    "Sizes": partial(_axes, partial(_list, _size)), "Tree": partial(_of_type, dict, "an object"),  # `pytree.check` looks inside
}  # fmt: skip
