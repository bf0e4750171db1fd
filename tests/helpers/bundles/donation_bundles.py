"""A handmade CUDA bundle for the fake driver, whose entries donate outputs to inputs. For n floats:

    make(x) = 2 x        take(a, b) = 2 a + b        again(a) = 2 a, which donates to itself

`make` and `again` write their outputs to donated ranges of the arena. `take` has a temporary, in the shared part of the arena.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import replace
from pathlib import Path
from struct import pack

from cgbundle.format import safetensors_files
from cgbundle.format.file_names import SELF_TEST, WEIGHTS, self_test_entry, whole_program_file
from cgbundle.format.schema import DonatedRange, Donation, EntrySpec, Manifest, Program, Region, Step, TensorSpec, Value
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.manifest_text import describe_files
from cgcompile.bundle.recordings import Function, Recording
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.cuda_bundles import ADD, ARENA_AT, INPUTS_AT, edge, launch, relocations
from tests.helpers.bundles.tiny_bundle import POSITIONAL

N = 64
SIZE = 4 * N
MAKE_AT, AGAIN_AT, SHARED_AT, ARENA, STATIC = 0, 512, 1024, 4096, 1024
A, B = 0, 512
"""Offsets of the inputs."""

DONATIONS = (
    Donation(source="again", output=0, target="again", input=0),
    Donation(source="again", output=0, target="take", input=1),
    Donation(source="make", output=0, target="again", input=0),
    Donation(source="make", output=0, target="take", input=0),
    Donation(source="make", output=0, target="take", input=1),
)
DONATED = (
    DonatedRange(entry="make", offset=MAKE_AT, bytes=AGAIN_AT - MAKE_AT),
    DonatedRange(entry="again", offset=AGAIN_AT, bytes=SHARED_AT - AGAIN_AT),
)

ADDS = {
    "make": [((ARENA_AT, MAKE_AT), (INPUTS_AT, A), (INPUTS_AT, A))],
    "again": [((ARENA_AT, AGAIN_AT), (INPUTS_AT, A), (INPUTS_AT, A))],
    "take": [((ARENA_AT, SHARED_AT), (INPUTS_AT, A), (INPUTS_AT, B)), ((ARENA_AT, 2048), (ARENA_AT, SHARED_AT), (INPUTS_AT, A))],
}
"""For each entry, the additions as (target, first operand, second operand); each of these is (memory, offset)."""


def recording(image: str, name: str) -> Recording:
    nodes = [
        launch(0, bytes(24) + pack("<i", N), relocations(*zip((0, 8, 16), *zip(*operands, strict=True), strict=True)))
        for operands in ADDS[name]
    ]
    function = Function(image=image, symbol="add", params=ADD, attributes=())
    edges = tuple([edge(number, number + 1) for number in range(len(nodes) - 1)])
    return Recording(key=(), functions=(function,), nodes=tuple(nodes), edges=edges)


def value(memory: str, offset: int) -> Value:
    return Value(dtype="float32", shape=(N,), strides=(1,), memory=memory, offset=offset)


def program(name: str, number: int) -> Program:
    inputs = [value("inputs", offset) for offset in ((A, B) if name == "take" else (A,))]
    (_, output), *_ = ADDS[name][-1]
    input_places = tuple(range(len(inputs)))
    output_places = (len(inputs),)
    steps = (Step(kind="graph", region=number, file=f"graphs/{name}.bin", inputs=input_places, outputs=output_places),)
    values = (*inputs, value("arena", output))
    return Program(key=(), values=values, inputs=input_places, outputs=output_places, steps=steps, arena=ARENA, static=STATIC)


def write(folder: Path) -> Manifest:
    """Writes all files of the bundle except the manifest, which it returns."""
    bare = cuda_bundles.write(folder, b"an image")
    image = hashlib.sha256(b"an image").hexdigest()
    for old in (folder / "graphs").iterdir():
        old.unlink()
    for name in ADDS:
        (folder / f"graphs/{name}.bin").write_bytes(tables.encode(recording(image, name)))
        path = folder / whole_program_file(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    tensors = {
        self_test_entry((), "input", index, name): ("float32", (N,), lambda index=index: numbers(index))
        for name in ADDS
        for index in range(2 if name == "take" else 1)
    }
    for name, entries in ((WEIGHTS, {}), (SELF_TEST, tensors)):
        with open(folder / name, "wb") as file:
            safetensors_files.write(file, entries)

    def spec(name: str) -> TensorSpec:
        return TensorSpec(name=name, dtype="float32", shape=(N,), order=(0,))

    def entry(number: int, name: str) -> EntrySpec:
        names = ["a", "b"] if name == "take" else ["x"]
        return replace(
            bare.entries[0], name=name, inputs=tuple(map(spec, names)), outputs=(spec("output"),), result={"tensor": 0},
            call={"call": [[name, {"tensor": index}] for index, name in enumerate(names)]}, parameters=(POSITIONAL,) * len(names),
            programs=(program(name, number),), self_test=replace(bare.entries[0].self_test, bounds=(0.0,)),
        )  # fmt: skip

    return replace(
        bare, entries=tuple([entry(number, name) for number, name in enumerate(ADDS)]), weights=(), module_state="",
        memories=(("inputs", STATIC), ("arena", ARENA)), regions=tuple([Region(name=name, kind="graph") for name in ADDS]),
        donations=DONATIONS, donated=DONATED, files=describe_files(str(folder)),
    )  # fmt: skip


def numbers(seed: int) -> array[float]:
    """Returns small integers as float32, so that every sum is exact."""
    return array("f", [(5 * i + 11 * seed) % 32 - 16 for i in range(N)])


def twice(values: array[float]) -> array[float]:
    return array("f", [2 * x for x in values])


def taken(a: array[float], b: array[float]) -> array[float]:
    return array("f", [2 * x + y for x, y in zip(a, b, strict=True)])
