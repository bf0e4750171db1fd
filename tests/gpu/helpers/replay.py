"""Rebuilds recordings in a process without torch: `python replay.py PLAIN`, where recording.py wrote PLAIN.

It checks the recorder without a bundle. Memory has other addresses than in the recording process. The arena and undefined bytes of
parameters are filled with POISON. All keys are replayed, then again in reverse order. Outputs must equal those of the recording
process bit for bit.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[3] / "bundles")]

from cuda.bindings import driver  # noqa: E402

from cgbundle.format.schema import DTYPES, MEMORIES  # noqa: E402
from cgcompile.bundle.recordings import KernelNode, MemcpyNode, MemsetNode  # noqa: E402

POISON = 0xFF  # NaN as a float, -1 as an integer


def check(result: tuple) -> Any:
    if int(result[0]):
        raise SystemExit(f"{result[0]}")
    return result[1] if len(result) == 2 else result[1:]


def upload(address: int, data: bytes) -> None:
    if data:
        check(driver.cuMemcpyHtoD(address, data, len(data)))


def size_of(value) -> int:
    count = DTYPES[value.dtype]
    for n in value.shape:
        count *= n
    return count


def is_row_major(value) -> bool:
    expected = 1
    for n, stride in zip(value.shape[::-1], value.strides[::-1], strict=True):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


def elements(value):
    """Returns the byte offsets of a value's elements, in row-major order."""
    offsets = [0]
    for n, stride in zip(value.shape, value.strides, strict=True):
        offsets = [o + i * stride for o in offsets for i in range(n)]
    return [o * DTYPES[value.dtype] for o in offsets]


def write(base: dict, value, data: bytes) -> None:
    size, item = size_of(value), DTYPES[value.dtype]
    if is_row_major(value):
        return upload(base[value.memory] + value.offset, data)
    raw = bytearray(size)
    for i, offset in enumerate(elements(value)):
        raw[offset : offset + item] = data[i * item : (i + 1) * item]
    upload(base[value.memory] + value.offset, bytes(raw))


def read(base: dict, value) -> bytes:
    direct = is_row_major(value)
    places, item = [] if direct else elements(value), DTYPES[value.dtype]
    raw = bytearray(size_of(value) if direct else max(places, default=-item) + item)
    if not raw:
        return b""
    view = (ctypes.c_char * len(raw)).from_buffer(raw)
    check(driver.cuMemcpyDtoH(ctypes.addressof(view), base[value.memory] + value.offset, len(raw)))
    return bytes(raw) if direct else b"".join(raw[o : o + item] for o in places)


def set_attribute(node, number: int, values: tuple[int, int, int]) -> None:
    v = driver.CUkernelNodeAttrValue()
    if number == 2:
        v.cooperative = values[0]
    elif number == 4:
        v.clusterDim.x, v.clusterDim.y, v.clusterDim.z = values
    elif number == 5:
        v.clusterSchedulingPolicyPreference = driver.CUclusterSchedulingPolicy(values[0])
    elif number == 8:
        v.priority = values[0]
    elif number == 10:
        v.memSyncDomain = driver.CUlaunchMemSyncDomain(values[0])
    elif number == 11:
        v.preferredClusterDim.x, v.preferredClusterDim.y, v.preferredClusterDim.z = values
    elif number == 14:
        v.sharedMemCarveout = values[0]
    else:
        raise SystemExit(f"attribute {number} {values}")
    check((*driver.cuGraphKernelNodeSetAttribute(node, driver.CUlaunchAttributeID(number), v), 0))


def build(recording, base: dict, functions: dict, context, keep: list):
    graph = check(driver.cuGraphCreate(0))
    place = lambda a: base[MEMORIES[a.memory]] + a.offset  # noqa: E731
    nodes = []
    for row in recording.nodes:
        if isinstance(row, KernelNode):
            function = recording.functions[row.function]
            handle = functions[function.image, function.symbol]
            for number, value in function.attributes:
                check((*driver.cuFuncSetAttribute(handle, driver.CUfunction_attribute(number), value), 0))
            block = bytearray(row.block)
            for start, size in row.undefined:
                block[start : start + size] = bytes([0xA5]) * size
            for relocation in row.relocations:
                block[relocation.at : relocation.at + 8] = place(relocation.target).to_bytes(8, "little")
            data = (ctypes.c_char * max(1, len(block))).from_buffer(block or bytearray(1))
            pointers = (ctypes.c_void_p * max(1, len(function.params)))(*(ctypes.addressof(data) + o for o, _ in function.params))
            keep += [block, data, pointers]
            p = driver.CUDA_KERNEL_NODE_PARAMS()
            p.func, p.sharedMemBytes, p.kernelParams = handle, row.shared, ctypes.addressof(pointers)
            p.gridDimX, p.gridDimY, p.gridDimZ = row.grid
            p.blockDimX, p.blockDimY, p.blockDimZ = row.threads
            nodes.append(check(driver.cuGraphAddKernelNode(graph, [], 0, p)))
            for number, values in row.attributes:
                set_attribute(nodes[-1], number, values)
        elif isinstance(row, MemsetNode):
            p = driver.CUDA_MEMSET_NODE_PARAMS()
            p.dst, p.value, p.elementSize = place(row.target), row.value, row.element
            p.width, p.height, p.pitch = row.width, row.height, row.pitch
            nodes.append(check(driver.cuGraphAddMemsetNode(graph, [], 0, p, context)))
        elif isinstance(row, MemcpyNode):
            p = driver.CUDA_MEMCPY3D()
            p.srcMemoryType = p.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
            p.srcDevice, p.dstDevice = place(row.source), place(row.target)
            p.WidthInBytes, p.Height, p.Depth = row.width, row.height, row.depth
            p.srcPitch, p.srcHeight, p.dstPitch, p.dstHeight = (
                row.source_pitch, row.source_height, row.target_pitch, row.target_height,
            )  # fmt: skip
            nodes.append(check(driver.cuGraphAddMemcpyNode(graph, [], 0, p, context)))
        else:
            nodes.append(check(driver.cuGraphAddEmptyNode(graph, [], 0)))
    for edge in recording.edges:  # one at a time: the driver applies the data of the first edge to all
        e = driver.CUgraphEdgeData()
        e.from_port, e.to_port, e.type = edge.from_port, edge.to_port, edge.type
        check((*driver.cuGraphAddDependencies(graph, [nodes[edge.source]], [nodes[edge.target]], [e], 1), 0))
    return check(driver.cuGraphInstantiate(graph, 0))


def main(path: str) -> str:
    plain = pickle.loads(Path(path).read_bytes())
    driver.cuInit(0)
    context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))
    driver.cuCtxSetCurrent(context)
    for shift in (3 << 20, 77 << 20):
        check(driver.cuMemAlloc(shift))
    sizes = {"weights": plain["weights_bytes"], "inputs": plain["static"], "arena": plain["arena"]}
    sizes["state"] = plain["state_bytes"] or 256
    base = {name: int(check(driver.cuMemAlloc(size))) for name, size in sizes.items()}
    check((*driver.cuMemsetD8(base["inputs"], POISON, sizes["inputs"]), 0))

    def load(memory: str) -> None:
        for w in plain["weights"]:
            if w.tensor == w.name and w.memory == memory:
                upload(base[memory] + w.offset, plain["weight_contents"][w.tensor])

    load("weights")
    for offset, contents in plain["tables"]:
        upload(base["weights"] + offset, contents)
    modules = {image: check(driver.cuModuleLoadData(data)) for image, data in plain["images"].items()}
    for state in plain["states"]:
        data = bytearray(state.contents)
        for r in state.relocations:
            data[r.at : r.at + 8] = (base[MEMORIES[r.target.memory]] + r.target.offset).to_bytes(8, "little")
        upload(int(check(driver.cuModuleGetGlobal(modules[state.image], state.symbol.encode()))[0]), bytes(data))
    functions = {
        (f.image, f.symbol): check(driver.cuModuleGetFunction(modules[f.image], f.symbol.encode()))
        for recording in plain["recordings"].values()
        for f in recording.functions
    }
    keep: list = []
    graphs = {key: build(r, base, functions, context, keep) for key, r in plain["recordings"].items()}
    stream = check(driver.cuStreamCreate(1))
    wrong = []
    for turn, keys in enumerate((list(graphs), list(graphs)[::-1])):
        for key in keys:
            if turn == 0:
                check((*driver.cuMemsetD8(base["arena"], POISON, sizes["arena"]), 0))
            load("state")
            for value, data in zip(plain["inputs"][key], plain["trials"][key][0], strict=True):
                write(base, value, data)
            # the fills and small copies above are asynchronous, and the graph's stream does not wait for them
            check((*driver.cuCtxSynchronize(), 0))
            check((*driver.cuGraphLaunch(graphs[key], stream), 0))
            check((*driver.cuStreamSynchronize(stream), 0))
            for i, (value, data) in enumerate(zip(plain["outputs"][key], plain["trials"][key][1], strict=True)):
                if read(base, value) != data:
                    wrong.append(f"{key} output {i} turn {turn}")
    assert "torch" not in sys.modules
    return f"differs: {', '.join(wrong)}" if wrong else "exact"


if __name__ == "__main__":
    print(main(sys.argv[1]))
