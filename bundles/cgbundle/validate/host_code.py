"""The manifest rows that a shared object was compiled for, appended to the ELF object. Readers compare them: AOTInductor's objects
do not have the shapes that they were compiled for, and with others they would access memory out of bounds."""

from __future__ import annotations

import json
import os
from operator import attrgetter
from typing import Any

from ..format.file_names import host_regions
from ..format.limits import parse
from ..format.records import is_record, members
from ..format.schema import Manifest, Value, Weight

MAGIC = b"cgb-rows"
"""The last bytes of the file; before them the length of the rows in 8 bytes, and before that the rows."""

SIGNATURE = ("name", "dimensions", "inputs", "mutated_inputs", "outputs", "aliases", "call", "parameters", "result")
"""Fields of the entry that the code of a whole model depends on, beside its values."""

CONTENTS = ("zeros",)  # fields about the contents of memory, on which code does not depend
_WEIGHT, _VALUE = [attrgetter(*[name for name in members(record) if name not in CONTENTS]) for record in (Weight, Value)]


def described(manifest: Manifest, region: int) -> bytes:
    """The rows that the code of a host region depends on, as canonical JSON."""
    # the entry that runs the region, else the first entry
    entry = next((entry for entry in manifest.entries if region in host_regions(entry)), manifest.entries[0])
    calls = []
    for program in entry.programs:
        for step in program.steps:
            if step.kind == "host" and step.region == region:
                sides = [[_VALUE(program.values[index]) for index in side] for side in (step.inputs, step.outputs)]
                calls.append((program.key, sides))
    constants = [(name, _WEIGHT(manifest.weights[weight])) for name, weight in manifest.regions[region].constants]
    plain: dict[str, Any] = {"constants": constants, "calls": calls}
    if manifest.target.kind == "cpu":
        plain |= {name: _plain(getattr(entry, name)) for name in SIGNATURE} | {"random": manifest.random}
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def attach(folder: str | os.PathLike[str], manifest: Manifest) -> None:
    """Appends the rows to every shared object of the bundle in `folder`, replacing earlier ones. The files' hashes change."""
    for index, region in enumerate(manifest.regions):
        if region.file:
            text = described(manifest, index)
            with open(os.path.join(folder, region.file), "r+b") as file:
                data = file.read()
                rows = read(data)
                file.seek(len(data) if rows is None else len(data) - len(rows) - 8 - len(MAGIC))
                file.write(text + len(text).to_bytes(8, "little") + MAGIC)
                file.truncate()


def read(data: bytes) -> bytes | None:
    end = len(data) - len(MAGIC) - 8
    length = int.from_bytes(data[-len(MAGIC) - 8 : -len(MAGIC)], "little")
    if not data.endswith(MAGIC) or end < length:
        return None
    return data[end - length : end]


def difference(actual: bytes, expected: bytes) -> str:
    """The first field that differs between two results of `described`; "" if one is invalid."""
    try:
        here, there = parse(actual), parse(expected)
        return str(next(name for name in sorted(there) if here.get(name) != there[name]))
    except (ValueError, AttributeError, StopIteration):
        return ""


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if is_record(value):
        return [_plain(getattr(value, name)) for name in members(type(value))]
    return value
