"""A small handmade bundle for several GPUs. Tests of its runtime run it against `ranks_driver` or on GPUs.

For key k and n = 16 k floats, rank r computes a = input + weight(r). An all_reduce sums a over the ranks; the sum is the output.
The weights of rank r are r, r + 1, r + 2, ...
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from struct import pack

from cgbundle.format import safetensors_files
from cgbundle.format.file_names import PROGRAM, SELF_TEST, WEIGHTS, self_test_entry
from cgbundle.format.schema import MEMORIES, Dimension, Manifest, Program, SelfTest, Step, TensorSpec, Value, Weight
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.manifest_text import describe_files
from cgcompile.bundle.recordings import Function, Recording
from cgcompile.targets.collectives.exchange_nodes import ExchangeKernels, exchange_node, needed_memory, transfer
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.cuda_bundles import ADD, FLOATS, KEYS, address, edge, launch, relocations
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.tiny_bundle import POSITIONAL, bounds, proof, seal

WEIGHTS_AT, INPUTS_AT, ARENA_AT = [MEMORIES.index(name) for name in ("weights", "inputs", "arena")]
SUM, RESULT = 0, 1024


def write(folder: Path, image: bytes, world: int = 2, exchange: bytes | None = None, arch: str = "sm_90") -> Manifest:
    """Writes the bundle of `world` ranks and returns the manifest of rank 0. `image` holds the kernel `add`, `exchange` the kernels
    of the collectives (None: the same file)."""
    (folder / "kernels").mkdir(parents=True)
    for contents in (image, exchange or image):
        (folder / "kernels" / hashlib.sha256(contents).hexdigest()).write_bytes(contents)
    for rank in range(1, world):
        _write_rank(folder / "ranks" / str(rank), image, world, rank, exchange, arch)
    return _write_rank(folder, image, world, 0, exchange, arch)


def kernels(world: int, rank: int, exchange: bytes) -> ExchangeKernels:
    sent = [transfer("all_reduce", "float32", 4 * key * FLOATS, world) for key in KEYS]
    return ExchangeKernels(rank=rank, memory=needed_memory(world, sent), image=exchange)


def recording(image: str, key: int, rank_kernels: ExchangeKernels) -> Recording:
    n = key * FLOATS
    sent = transfer("all_reduce", "float32", 4 * n, rank_kernels.memory.world)
    add = launch(0, bytes(24) + pack("<i", n), relocations((0, ARENA_AT, SUM), (8, WEIGHTS_AT, 0), (16, INPUTS_AT, 0)))
    reduce = exchange_node(1, sent, rank_kernels.memory, rank_kernels.rank, address(ARENA_AT, SUM), address(ARENA_AT, RESULT))
    functions = (Function(image=image, symbol="add", params=ADD, attributes=()), rank_kernels.function(sent))
    return Recording(key=(key,), functions=functions, nodes=(add, reduce), edges=(edge(0, 1),))


def inputs(key: int, seed: int = 0) -> array[float]:
    return cuda_bundles.inputs(key, seed)


def expected(values: Sequence[float], world: int = 2) -> array[float]:
    """Returns the sum over all ranks; integers, so every result is exact."""
    return array("f", [sum(x + rank + index for rank in range(world)) for index, x in enumerate(values)])


def _write_rank(folder: Path, image: bytes, world: int, rank: int, exchange: bytes | None, arch: str) -> Manifest:
    name = hashlib.sha256(image).hexdigest()
    rank_kernels = kernels(world, rank, exchange or image)
    (folder / "graphs").mkdir(parents=True)
    for key in KEYS:
        (folder / "graphs" / f"g0-{key}.bin").write_bytes(tables.encode(recording(name, key, rank_kernels)))
    numbers = array("f", [rank + index for index in range(KEYS[-1] * FLOATS)])
    with open(folder / WEIGHTS, "wb") as file:
        safetensors_files.write(file, {"offsets": ("float32", (len(numbers),), lambda: numbers)})
    (folder / PROGRAM).write_bytes(b"PK, but not really\n")
    contents = {}
    for key in KEYS:
        for kind, data in (("input", inputs(key)), ("output", expected(inputs(key), world))):
            contents[self_test_entry((key,), kind, 0)] = ("float32", (key, FLOATS), partial(bytes, data))
    with open(folder / SELF_TEST, "wb") as file:
        safetensors_files.write(file, contents)
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", FLOATS), order=(0, 1))
    files = describe_files(str(folder))
    if rank:  # a rank also uses the images in the folder of rank 0
        files = (*files, *[file for file in describe_files(str(folder.parents[1])) if file.path.startswith("kernels/")])
    rank_manifest = edited(
        cuda_bundles.manifest(arch),
        dimensions=(Dimension(name="batch", sizes=KEYS, pad="no", chunk=False, reason="not proved"),),
        inputs=(spec,),
        outputs=(replace(spec, name="y"),),
        call={"call": [["x", {"tensor": 0}]]},
        parameters=(POSITIONAL,),
        result={"tensor": 0},
        weights=(
            Weight(
                name="offsets", tensor="offsets", dtype="float32", shape=(len(numbers),), strides=(1,), memory="weights", offset=0
            ),
        ),
        world=rank_kernels.world,
        memories=(("weights", 1024), ("inputs", 1024), ("arena", 4096), ("peer", world * rank_kernels.world.stride)),
        programs=tuple(map(_program, KEYS)),
        module_state="",
        self_test=SelfTest(
            compare="bits", calls=1, expected="recording", bounds=bounds("float32"),
            proofs=tuple([proof(key, method="none", tolerance=0.0) for key in KEYS]),
        ),
        files=tuple(sorted(files, key=lambda file: file.path)),
    )  # fmt: skip
    seal(folder, rank_manifest)
    return rank_manifest


def _program(key: int) -> Program:
    def value(memory: str, offset: int) -> Value:
        return Value(dtype="float32", shape=(key, FLOATS), strides=(FLOATS, 1), memory=memory, offset=offset)

    step = Step(kind="graph", region=0, file=f"graphs/g0-{key}.bin", inputs=(0,), outputs=(1,))
    return Program(
        key=(key,), values=(value("inputs", 0), value("arena", RESULT)), inputs=(0,), outputs=(1,), steps=(step,), arena=4096,
        static=1024,
    )  # fmt: skip
