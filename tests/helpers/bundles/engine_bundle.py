"""A small handmade bundle with the graphs of an engine, made from the recordings in `cuda_bundles`.

Graph "small" reads tensor `small` (4 rows). Graph (8, "rows") reads tensor `x` (8 rows), whose first 4 rows are `small`. The first
graph leaves `result` in the arena, the second one writes to tensor `out`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cgbundle.format import safetensors_files
from cgbundle.format.file_names import MANIFEST, TABLES, WEIGHTS
from cgbundle.format.schema import Engine, EngineGraph, EngineSpan, EngineTensor, Manifest, Weight
from cgbundle.validate.engine import encode_key
from cgcompile.bundle import manifest_text
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import KernelNode, Recording, encode_states
from tests.helpers.bundles import cuda_bundles as rows
from tests.helpers.bundles.cuda_bundles import ARENA_AT, FLOATS, INPUTS_AT, RESULT, address

KEYS = ("small", (8, "rows"))
OUT, INPUTS = 768, 2048
"""Offset of tensor `out` in memory inputs, and the size of this memory in bytes."""

IMAGE = b"an image"


def engine() -> Engine:
    """Returns the `engine` field of the manifest."""

    def tensor(name: str, number: int, memory: str, offset: int) -> EngineTensor:
        shape, strides = (number, FLOATS), (FLOATS, 1)
        return EngineTensor(name=name, dtype="float32", shape=shape, strides=strides, memory=memory, offset=offset)  # type: ignore[arg-type]

    return Engine(
        graphs=tuple([EngineGraph(key=encode_key(key), file=f"graphs/{at}.bin") for at, key in enumerate(KEYS)]),
        tensors=(
            tensor("small", 4, "inputs", 0), tensor("x", 8, "inputs", 0), tensor("out", 8, "inputs", OUT),
            tensor("result", 4, "arena", RESULT),
        ),
        spans=(
            EngineSpan(offset=0, bytes=8 * FLOATS * 4, alignment=16), EngineSpan(offset=OUT, bytes=8 * FLOATS * 4, alignment=4),
        ),
        verified=True,
    )  # fmt: skip


def recording(image: str, position: int) -> Recording:
    """Returns the recording of graph number `position`."""
    rows_recording = replace(rows.recording(image, (4, 8)[position]), key=(position,))
    if not position:
        return rows_recording
    combine = rows_recording.nodes[0]
    assert isinstance(combine, KernelNode)
    places = rows.relocations((0, INPUTS_AT, OUT), (8, ARENA_AT, rows.SUM), (24, ARENA_AT, rows.TWO))
    return replace(rows_recording, nodes=(replace(combine, relocations=places), *rows_recording.nodes[1:]))


def write(
    folder: Path, change: Callable[[Manifest], Manifest] = lambda manifest: manifest, record: Callable[..., Recording] = recording
) -> Path:
    """Writes the bundle with the manifest that `change` returns. Returns the path of the bundle."""
    name = hashlib.sha256(IMAGE).hexdigest()
    (folder / "kernels").mkdir(parents=True)
    (folder / "graphs").mkdir()
    (folder / "kernels" / name).write_bytes(IMAGE)
    for position in range(len(KEYS)):
        (folder / f"graphs/{position}.bin").write_bytes(tables.encode(record(name, position)))
    (folder / "graphs/modules.bin").write_bytes(encode_states(rows.module_states(name)))
    offsets = array("f", range(8 * FLOATS))
    with open(folder / WEIGHTS, "wb") as file:
        safetensors_files.write(file, {})
    with open(folder / TABLES, "wb") as file:
        safetensors_files.write(file, {"table": ("float32", (len(offsets),), lambda: offsets)})
    table = Weight(name="table", tensor="table", dtype="float32", shape=(len(offsets),), strides=(1,), offset=256, computed=True)
    manifest = replace(
        rows.manifest(driver=13000),
        entries=(),
        regions=(),
        weights=(table,),
        memories=(("weights", 1024), ("inputs", INPUTS), ("arena", rows.ARENA)),
        engine=engine(),
        files=manifest_text.describe_files(str(folder)),
    )
    (folder / MANIFEST).write_bytes(manifest_text.encode(change(manifest)))
    return folder


__all__ = ["FLOATS", "KEYS", "address", "engine", "recording", "write"]
