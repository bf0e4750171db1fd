"""Parses int_keys: `8`, `8x128`, `batch=8,seq=128`, `-` for a model without dimensions, `decode:8` for an entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgbundle.errors import CallError
from cgcompile.util.model_file import closest

from .output import listed

if TYPE_CHECKING:
    from cgbundle.format.schema import EntrySpec, Manifest


def find(manifest: Manifest, text: str) -> tuple[EntrySpec, tuple[int, ...]]:
    """Returns the entry and the recorded int_key that `text` names, such as `decode:8`.  If `text` names no entry, the first entry
    is used.  Raises entry-missing, key-missing."""
    from cgbundle.format.file_names import entry_named  # imported here: saves 25 ms in commands that read no bundle

    name, colon, key = text.partition(":")
    entry = entry_named(manifest, name.strip() if colon else "")
    return entry, parse(entry, key if colon else text)


def parse(entry: EntrySpec, text: str) -> tuple[int, ...]:
    """Returns the recorded int_key that `text` names.  Raises key-missing, with the recorded keys, if there is none."""
    names = [dimension.name for dimension in entry.dimensions]
    for part in text.split(",") if "=" in text else ():
        if (label := part.partition("=")[0].strip()) not in names:
            best = closest(label, names)
            hint = f" (did you mean {best}?)" if best else ""
            raise CallError("key-missing", f"no dimension {label!r}{hint}: the bundle has {listed(names) or 'none'}")
    if "=" in text:
        sizes = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
        words = [sizes.get(name, "") for name in names] if sizes.keys() == set(names) and text.count("=") == len(names) else []
    else:
        words = [] if text == "-" else text.replace(",", "x").split("x")
    try:
        key = tuple([int(word) for word in words])
    except ValueError:
        key = (0,)
    recorded = [program.key for program in entry.programs]
    if key not in recorded:
        shape = f" ({' x '.join(names)})" if names else ""
        raise CallError(
            "key-missing",
            f"no int_key {text!r}: the bundle has {listed([spell(recorded_key) for recorded_key in recorded])}{shape}",
            "give a recorded int_key; calls of other sizes use one of them if the dimension can be padded or chunked",
        )
    return key


def spell(key: tuple[int, ...]) -> str:
    """Formats an int_key: `8x128`."""
    return "x".join(map(str, key)) or "-"
