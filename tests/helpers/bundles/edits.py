"""Changed copies of records, for tests that change fields of a manifest or of its first entry."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from cgbundle.format.schema import EntrySpec, Manifest

OF_ENTRY = {field.name for field in fields(EntrySpec)} - {"name"}


def edited(record: Any, **changes: Any) -> Any:
    """Works like `dataclasses.replace`. For a manifest, fields that only entries have are changed in its first entry."""
    if not isinstance(record, Manifest):
        return replace(record, **changes)
    entry_changes = {name: value for name, value in changes.items() if name in OF_ENTRY}
    first, *others = changes.get("entries", record.entries)
    entries = (replace(first, **entry_changes), *others)
    return replace(record, **{name: value for name, value in changes.items() if name not in entry_changes} | {"entries": entries})


def located(path: str) -> str:
    """Returns the path of a field in a manifest; adds `entries[0].` if only entries have that field."""
    field = path.replace("[", ".").partition(".")[0]
    return f"entries[0].{path}" if field in OF_ENTRY else path
