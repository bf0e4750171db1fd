"""The bundle of `state_bundles`, with state whose number of rows is chosen at load time.

State `lines`, uint8 (rows, 8), is used by no node. State `total`, float32 (rows, 4), follows it in memory and starts as zeros. A
call adds the first row of x to its first four rows. `number` holds the number of rows. No output shares memory with this state.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from cgbundle.format import safetensors_files
from cgbundle.format.file_names import WEIGHTS
from cgbundle.format.schema import Manifest, StateDimension, Weight
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.manifest_text import describe_files
from tests.helpers.bundles import state_bundles
from tests.helpers.bundles.cuda_bundles import FLOATS, KEYS, STATE_AT
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.tiny_bundle import bounds

LEAST = 4
NUMBER, LINES, TOTAL = 768, 1024, 1536
STATE = 2048
OUTPUTS = ("y", "head", "same", "tail", "table")


def write(folder: Path, most: int | None = None) -> Manifest:
    """Writes all files of the bundle except the manifest, which it returns."""
    base = state_bundles.write(folder)
    for key in KEYS:
        file = folder / "graphs" / f"g0-{key}.bin"
        recording = tables.decode(file.read_bytes())
        file.write_bytes(tables.encode(replace(recording, nodes=tuple(map(_over_rows, recording.nodes)))))
    offsets = array("f", range(KEYS[-1] * FLOATS))
    contents: dict[str, Any] = {
        "offsets": ("float32", (len(offsets),), lambda: offsets),
        "small": ("uint8", (3,), lambda: b"abc"),
        "random": ("int64", (2,), lambda: bytes(16)),
        "number": ("int64", (1,), lambda: array("q", [LEAST])),
    }
    with open(folder / WEIGHTS, "wb") as out:
        safetensors_files.write(out, contents)
    rows = [row for row in base.weights if row.name != "total"]
    rows += [
        Weight(name=name, tensor=name, dtype=dtype, shape=shape, strides=strides, memory="state", offset=offset, zeros=zeros)
        for name, dtype, shape, strides, offset, zeros in (
            ("lines", "uint8", (LEAST, 8), (8, 1), LINES, True), ("total", "float32", (LEAST, 4), (4, 1), TOTAL, True),
            ("number", "int64", (1,), (1,), NUMBER, False),
        )
    ]  # fmt: skip
    names = [row.name for row in rows]
    entry = base.entries[0]
    places = [index for index in range(6) if index != 1]
    aliases = [replace(alias, output=places.index(alias.output)) for alias in entry.aliases if alias.output in places]
    aliases = [replace(alias, index=names.index("offsets")) if alias.memory == "weights" else alias for alias in aliases]
    return edited(
        base,
        outputs=tuple([entry.outputs[index] for index in places]),
        aliases=tuple(aliases),
        random=names.index("random"),
        mutated_buffers=tuple(sorted(map(names.index, ("lines", "total", "marks", "random")))),
        result={"dict": [[name, {"tensor": place}] for place, name in enumerate(OUTPUTS)]},
        weights=tuple(rows),
        memories=tuple([(name, STATE if name == "state" else size) for name, size in base.memories]),
        state_dimensions=(
            StateDimension(
                name="rows", weights=(names.index("lines"), names.index("total")), count=names.index("number"), most=most
            ),
        ),
        programs=tuple([_without(program) for program in entry.programs]),
        self_test=replace(entry.self_test, bounds=bounds(*["float32"] * 5, "uint8", "int64", "uint8", "float32", "int64")),
        files=describe_files(str(folder)),
    )  # fmt: skip


def _over_rows(node: Any) -> Any:
    """Returns the node with the new offset of `total` in its relocations."""
    relocations = [
        replace(relocation, target=replace(relocation.target, offset=TOTAL))
        if (relocation.target.memory, relocation.target.offset) == (STATE_AT, state_bundles.TOTAL) else relocation
        for relocation in getattr(node, "relocations", ())
    ]  # fmt: skip
    return replace(node, relocations=tuple(relocations)) if relocations else node


def _without(program: Any) -> Any:
    """Returns the program without the output `total`."""
    values = [value for value in program.values if value.memory != "state"]
    return replace(program, values=tuple(values), outputs=(2, *range(3, len(values))))
