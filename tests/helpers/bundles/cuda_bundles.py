"""A small CUDA bundle, made by hand. Tests of the backend run it on a GPU or against `fake_driver`.

Per key k its program computes, for n = 16 k floats,

    memset one ── add: sum = one + input ──┐
         └─────── memcpy: two = one ───────┴── combine: result = 3 sum + two + bias + table ── empty

and a copy step moves `result` to the output.  `bias` and `table` are data symbols of the image. The module state sets `bias` to 2.5
and `table` to the address of weight "offsets" (0, 1, 2, ...).  The second parameter of `combine` is a struct whose last word is
undefined.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import replace
from pathlib import Path
from struct import pack

from cgbundle.format import safetensors_files
from cgbundle.format.file_names import WEIGHTS
from cgbundle.format.schema import VERSION, EntrySpec, Manifest, Program, Provenance, Region, SelfTest, Step, Target, Value, Weight
from cgbundle.validate.module_state import Address, ModuleState, Relocation
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.manifest_text import describe_files
from cgcompile.bundle.recordings import Edge, EmptyNode, Function, KernelNode, MemcpyNode, MemsetNode, Recording, encode_states

SOURCE = r"""
struct Args { const float *x; float factor; int unused; };
extern "C" {
__device__ float bias = 0;
__device__ const float *table = 0;
__global__ void add(float *out, const float *a, const float *b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}
__global__ void combine(float *out, Args args, const float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = args.x[i] * args.factor + y[i] + bias + table[i];
}
__global__ void cluster_size(unsigned *out) {
    unsigned size;
    asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    if (threadIdx.x == 0) out[blockIdx.x] = size;
}
__global__ void large_shared(unsigned *out, unsigned words) {
    extern __shared__ unsigned stage[];
    for (unsigned i = threadIdx.x; i < words; i += blockDim.x) stage[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) out[0] = stage[words - 1];
}
}
"""

ADD = ((0, 8), (8, 8), (16, 8), (24, 4))
COMBINE = ((0, 8), (8, 16), (24, 8), (32, 4))
"""(offset, size) of each kernel parameter."""

KEYS = (4, 8)
FLOATS = 16
"""Floats per row: an input of key k has the shape (k, FLOATS)."""

ARENA, STATIC = 4096, 1024
WEIGHTS_AT, STATE_AT, INPUTS_AT, ARENA_AT = range(4)
ONE, SUM, TWO, RESULT, OUTPUT = 0, 512, 1024, 1536, 2048
"""Offsets in the arena."""


def address(memory: int, offset: int) -> Address:
    return Address(memory=memory, offset=offset)


def relocations(*places: tuple[int, int, int]) -> tuple[Relocation, ...]:
    return tuple(Relocation(at=at, target=address(memory, offset)) for at, memory, offset in places)


def edge(source: int, target: int, from_port: int = 0, type: int = 0) -> Edge:
    return Edge(source=source, target=target, from_port=from_port, to_port=0, type=type)


def launch(function: int, block: bytes, places: tuple[Relocation, ...], undefined: tuple[tuple[int, int], ...] = ()) -> KernelNode:
    return KernelNode(
        function=function,
        grid=(4, 1, 1),
        threads=(32, 1, 1),
        shared=0,
        block=block,
        relocations=places,
        undefined=undefined,
        attributes=(),
    )


def recording(image: str, key: int) -> Recording:
    """Returns the graph of the module docstring. Its nodes are numbered so that some edges point to a lower number."""
    n = key * FLOATS
    one = MemsetNode(target=address(ARENA_AT, ONE), value=0x3F800000, element=4, width=n, height=1, pitch=0)
    add = launch(0, bytes(24) + pack("<i", n), relocations((0, ARENA_AT, SUM), (8, ARENA_AT, ONE), (16, INPUTS_AT, 0)))
    two = MemcpyNode(
        source=address(ARENA_AT, ONE),
        target=address(ARENA_AT, TWO),
        width=4 * FLOATS,
        height=key,
        depth=1,
        source_pitch=4 * FLOATS,
        source_height=key,
        target_pitch=4 * FLOATS,
        target_height=key,
    )
    block = bytes(16) + pack("<f", 3.0) + bytes(12) + pack("<i", n)
    combine = launch(1, block, relocations((0, ARENA_AT, RESULT), (8, ARENA_AT, SUM), (24, ARENA_AT, TWO)), undefined=((20, 4),))
    return Recording(
        key=(key,),
        functions=(
            Function(image=image, symbol="add", params=ADD, attributes=()),
            Function(image=image, symbol="combine", params=COMBINE, attributes=((9, -1),)),
        ),
        nodes=(combine, add, two, one, EmptyNode()),
        edges=(edge(3, 1), edge(3, 2), edge(1, 0), edge(2, 0), edge(0, 4)),
    )


def module_states(image: str) -> tuple[ModuleState, ...]:
    return (
        ModuleState(image=image, symbol="bias", contents=pack("<f", 2.5), relocations=()),
        ModuleState(image=image, symbol="table", contents=bytes(8), relocations=relocations((0, WEIGHTS_AT, 256))),
    )


def program(key: int) -> Program:
    def value(memory: str, offset: int) -> Value:
        return Value(dtype="float32", shape=(key, FLOATS), strides=(FLOATS, 1), memory=memory, offset=offset)

    return Program(
        key=(key,),
        values=(value("inputs", 0), value("arena", RESULT), value("arena", OUTPUT)),
        inputs=(0,),
        outputs=(2,),
        steps=(
            Step(kind="graph", region=0, file=f"graphs/g0-{key}.bin", inputs=(0,), outputs=(1,)),
            Step(kind="copy", region=0, file="", inputs=(1,), outputs=(2,)),
        ),
        arena=ARENA,
        static=STATIC,
    )


def write(folder: Path, image: bytes, arch: str = "sm_90", driver: int = 12000) -> Manifest:
    """Writes all files of the bundle except the manifest, which it returns."""
    name = hashlib.sha256(image).hexdigest()
    (folder / "kernels").mkdir(parents=True)
    (folder / "graphs").mkdir()
    (folder / "kernels" / name).write_bytes(image)
    for key in KEYS:
        (folder / "graphs" / f"g0-{key}.bin").write_bytes(tables.encode(recording(name, key)))
    (folder / "graphs" / "modules.bin").write_bytes(encode_states(module_states(name)))
    offsets = array("f", range(KEYS[-1] * FLOATS))
    with open(folder / WEIGHTS, "wb") as file:
        safetensors_files.write(
            file,
            {
                "offsets": ("float32", (len(offsets),), lambda: offsets),
                "small": ("uint8", (3,), lambda: b"abc"),
            },
        )
    return replace(
        manifest(arch, driver),
        weights=(
            Weight(name="small", tensor="small", dtype="uint8", shape=(3,), strides=(1,), memory="weights", offset=0),
            Weight(
                name="offsets", tensor="offsets", dtype="float32", shape=(len(offsets),), strides=(1,), memory="weights", offset=256
            ),
            Weight(
                name="tied", tensor="offsets", dtype="float32", shape=(len(offsets),), strides=(1,), memory="weights", offset=256
            ),
        ),
        files=describe_files(str(folder)),
    )


def manifest(arch: str = "sm_90", driver: int = 12000) -> Manifest:
    """Returns the manifest of the bundle. Its lists of weights and files are empty."""
    forward = EntrySpec(
        name="forward",
        inputs=(),
        outputs=(),
        call={},
        parameters=(),
        result={},
        programs=tuple(map(program, KEYS)),
        self_test=SelfTest(compare="bits", calls=1, expected="recording", bounds=(), proofs=()),
    )
    return Manifest(
        version=VERSION,
        name="tiny",
        target=Target(kind="cuda", arch=arch, driver=driver),
        entries=(forward,),
        memories=(("weights", 1024), ("state", 0), ("inputs", STATIC), ("arena", ARENA)),
        regions=(Region(name="g0", kind="graph"),),
        module_state="graphs/modules.bin",
        provenance=Provenance(source="", created="", versions=(), machine=""),
        files=(),
    )


def inputs(key: int, seed: int = 0) -> array[float]:
    """Returns small integers as float32, so that every result is exact."""
    return array("f", [(7 * i + 13 * seed) % 32 - 16 for i in range(key * FLOATS)])


def expected(values: array[float]) -> array[float]:
    return array("f", [3 * (1 + x) + 1 + 2.5 + i for i, x in enumerate(values)])
