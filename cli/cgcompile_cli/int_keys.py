"""int_keys as people type them: `8`, `8x128`, `batch=8,seq=128`, and `-` for a model without dimensions."""

from __future__ import annotations

from cgbundle.errors import CallError
from cgbundle.format.schema import Manifest

from .output import listed


def parse(manifest: Manifest, text: str) -> tuple[int, ...]:
    """The recorded int_key that `text` names.  Raises key-missing with the recorded keys where there is none."""
    names = [dimension.name for dimension in manifest.dimensions]
    if "=" in text:
        given = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
        words = [given.get(name, "") for name in names] if given.keys() == set(names) and text.count("=") == len(names) else []
    else:
        words = [] if text == "-" else text.replace(",", "x").split("x")
    try:
        key = tuple([int(word) for word in words])
    except ValueError:
        key = (0,)
    recorded = [program.key for program in manifest.programs]
    if key not in recorded:
        shape = f" ({' x '.join(names)})" if names else ""
        raise CallError("key-missing", f"no int_key {text!r}: the bundle has {listed([spell(each) for each in recorded])}{shape}")
    return key


def spell(key: tuple[int, ...]) -> str:
    """`8x128`."""
    return "x".join(map(str, key)) or "-"
