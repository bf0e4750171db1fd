"""The bundle of `cuda_bundles` with state, with outputs that share memory, and with a call signature.

For key k and x of shape (k, 16), a call returns

    y       as in cuda_bundles, in its own memory
    total   state `total` itself, after the call has added the first row of x to its 16 numbers; it starts as 0, 1, 2, ...
    head    the first 4 columns of y
    same    x itself
    tail    the columns of x from 4 on
    table   weight `offsets` itself

and fills state `marks` (8 bytes, initially zeros) with 7s.  It has state for random numbers, but no call draws any.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from struct import pack
from typing import Any

from cgbundle.format import safetensors_files
from cgbundle.format.file_names import PROGRAM, WEIGHTS
from cgbundle.format.schema import Alias, Dimension, Manifest, SelfTest, TensorSpec, Value, Weight
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.manifest_text import describe_files
from cgcompile.bundle.recordings import MemsetNode
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.cuda_bundles import FLOATS, INPUTS_AT, KEYS, OUTPUT, STATE_AT, address, edge, launch, relocations
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.tiny_bundle import POSITIONAL, bounds, proof

STATE = 1024
TOTAL, MARKS, RANDOM = 0, 256, 512
"""Offsets in memory state."""

OUTPUTS = ("y", "total", "head", "same", "tail", "table")
FIRST = [float(number) for number in range(FLOATS)]
"""Initial value of state `total`."""


def value(memory: str, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: str = "float32") -> Value:
    return Value(dtype=dtype, shape=tuple(shape), strides=tuple(strides), memory=memory, offset=offset)


def write(folder: Path, image: bytes = b"an image", arch: str = "sm_90") -> Manifest:
    """Writes all files of the bundle except the manifest, which it returns."""
    base = cuda_bundles.write(folder, image, arch)
    for key in KEYS:
        file = folder / "graphs" / f"g0-{key}.bin"
        recording = tables.decode(file.read_bytes())
        places = relocations((0, STATE_AT, TOTAL), (8, STATE_AT, TOTAL), (16, INPUTS_AT, 0))
        grown = launch(0, bytes(24) + pack("<i", FLOATS), places)
        marked = MemsetNode(target=address(STATE_AT, MARKS), value=7, element=1, width=8, height=1, pitch=0)
        nodes = (*recording.nodes, grown, marked)
        edges = (*recording.edges, edge(len(nodes) - 3, len(nodes) - 2), edge(len(nodes) - 2, len(nodes) - 1))
        file.write_bytes(tables.encode(replace(recording, nodes=nodes, edges=edges)))
    offsets = array("f", range(KEYS[-1] * FLOATS))
    contents: dict[str, Any] = {
        "offsets": ("float32", (len(offsets),), lambda: offsets),
        "small": ("uint8", (3,), lambda: b"abc"),
        "total": ("float32", (FLOATS,), lambda: array("f", FIRST)),
        "random": ("int64", (2,), lambda: bytes(16)),
    }
    with open(folder / WEIGHTS, "wb") as out:
        safetensors_files.write(out, contents)
    (folder / PROGRAM).write_bytes(b"PK, but not really\n")
    rows = [
        Weight(name=name, tensor=name, dtype=dtype, shape=(size,), strides=(1,), memory="state", offset=offset, zeros=zeros)
        for name, dtype, size, offset, zeros in (
            ("total", "float32", FLOATS, TOTAL, False), ("marks", "uint8", 8, MARKS, True),
            ("random", "int64", 2, RANDOM, False),
        )
    ]  # fmt: skip
    weights = (*base.weights, *rows)
    names = [row.name for row in weights]
    return edited(
        base,
        dimensions=(Dimension(name="batch", sizes=KEYS, pad="no", chunk=False, reason="forward() changes state"),),
        inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", FLOATS), order=(0, 1)),),
        outputs=tuple(
            [
                TensorSpec(name=name, dtype="float32", shape=shape, order=tuple(range(len(shape))))
                for name, shape in zip(OUTPUTS, _shapes("batch"), strict=True)
            ]
        ),
        aliases=(
            Alias(output=1, memory="state", index=names.index("total")),
            Alias(output=2, memory="outputs", index=0),
            Alias(output=3, memory="inputs", index=0),
            Alias(output=4, memory="inputs", index=0),
            Alias(output=5, memory="weights", index=names.index("offsets")),
        ),
        random=names.index("random"),
        mutated_buffers=tuple([names.index(name) for name in ("total", "marks", "random")]),
        call={"call": [["x", {"tensor": 0}]]},
        parameters=(POSITIONAL,),
        result={"dict": [[name, {"tensor": place}] for place, name in enumerate(OUTPUTS)]},
        weights=weights,
        memories=tuple([(name, STATE if name == "state" else size) for name, size in base.memories]),
        programs=tuple([_program(program) for program in base.entries[0].programs]),
        self_test=SelfTest(
            compare="bits",
            calls=1,
            expected="recording",
            bounds=bounds(*["float32"] * 7, "uint8", "int64"),
            proofs=tuple([proof(key, method="none", tolerance=0.0) for key in KEYS]),
        ),
        files=describe_files(str(folder)),
    )


def _shapes(batch: Any) -> list[tuple[Any, ...]]:
    return [(batch, FLOATS), (FLOATS,), (batch, 4), (batch, FLOATS), (batch, FLOATS - 4), (KEYS[-1] * FLOATS,)]


def _program(program: Any) -> Any:
    (key,) = program.key
    places = [("state", TOTAL), ("arena", OUTPUT), ("inputs", 0), ("inputs", 16), ("weights", 256)]
    aliases = [
        value(memory, offset, shape, (1,) if len(shape) == 1 else (FLOATS, 1))
        for (memory, offset), shape in zip(places, _shapes(key)[1:], strict=True)
    ]
    return replace(program, values=(*program.values, *aliases), outputs=(2, *range(3, 3 + len(aliases))))
