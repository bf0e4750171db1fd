"""Times pieces (see prepare.py) on this machine's GPU with the driver alone: `measure.py OUT.json PIECES...`. Second of the three
parts of `make tune`.

Every launch of a round uses other addresses in a large allocation, so that weights come from memory and not from the cache, as in a
model. A round is one CUDA graph of many launches; a piece's time is the median over rounds.
"""

from __future__ import annotations

import ctypes
import json
import pickle
import statistics
import struct
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cu

ROOM = 1 << 30
LAUNCHES, ROUNDS = 24, 7
FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}


def check(result: tuple[Any, ...]) -> Any:
    """Returns the value of a driver call. Raises RuntimeError on an error."""
    if int(result[0]):
        raise RuntimeError(str(result[0]))
    return result[1] if len(result) == 2 else result[1:]


def main(out: str, *paths: str) -> None:
    """Writes {"gpu", "driver", "date", "problems": [{"problem", "measured": [{"candidate", "microseconds"}]}]}, fastest first."""
    check(cu.cuInit(0))
    device = check(cu.cuDeviceGet(0))
    context = check(cu.cuDevicePrimaryCtxRetain(device))
    check((*cu.cuCtxSetCurrent(context), 0))
    stream = check(cu.cuStreamCreate(1))
    room = int(check(cu.cuMemAlloc(ROOM)))
    fill(room)
    problems: dict[str, Any] = {}
    start = time.monotonic()
    pieces = [piece for path in paths for piece in pickle.loads(Path(path).read_bytes())]
    for problem, candidate, launches, _ in pieces:
        row = problems.setdefault(repr(problem), {"problem": asdict(problem), "measured": {}})
        try:
            duration = measure(launches, room, stream)
        except RuntimeError as error:
            print(f"{problem} {candidate}: {error}", flush=True)
            raise
        # a problem may cover several layouts of its operands: use their mean
        row["measured"].setdefault(repr(candidate), (candidate, []))[1].append(duration)
    rows = []
    for row in problems.values():
        measured = [(statistics.mean(times), candidate) for candidate, times in row["measured"].values()]
        measured.sort(key=lambda pair: pair[0])
        rows.append(
            {
                "problem": row["problem"],
                "measured": [{"candidate": asdict(candidate), "microseconds": round(us, 2)} for us, candidate in measured],
            }
        )
    name = check(cu.cuDeviceGetName(100, device)).split(b"\0")[0].decode()
    version = check(cu.cuDriverGetVersion())
    Path(out).write_text(json.dumps({"gpu": name, "driver": version, "date": time.strftime("%Y-%m-%d"), "problems": rows}))
    print(f"{out}: {len(pieces)} pieces in {time.monotonic() - start:.0f} s")


def fill(room: int) -> None:
    """Fills the memory with small numbers of any dtype: 0x3C3C is 1.06 as float16, 0.011 as bfloat16 and float32."""
    check((*cu.cuMemsetD16(room, 0x3C3C, ROOM // 2), 0))
    check((*cu.cuCtxSynchronize(), 0))


def measure(launches: Any, room: int, stream: Any) -> float:
    """Returns the microseconds of a piece."""
    keep: list[Any] = []
    functions = [load(image, symbol, shared, keep) for image, symbol, _, _, shared, _, _, _ in launches]
    graph = check(cu.cuGraphCreate(0))
    last: list[Any] = []
    at = 0
    for _ in range(LAUNCHES):
        for function, (_, _, grid, threads, shared, layout, params, arguments) in zip(functions, launches, strict=True):
            block, at = packed(layout, params, arguments, room, at)
            pointers = (ctypes.c_void_p * len(layout))(*[ctypes.addressof(block) + offset for offset, _ in layout])
            keep += [block, pointers]
            node = cu.CUDA_KERNEL_NODE_PARAMS()
            node.func, node.sharedMemBytes, node.kernelParams = function, shared, ctypes.addressof(pointers)
            node.gridDimX, node.gridDimY, node.gridDimZ = grid
            node.blockDimX, node.blockDimY, node.blockDimZ = threads, 1, 1
            last = [check(cu.cuGraphAddKernelNode(graph, last, len(last), node))]
    executable = check(cu.cuGraphInstantiate(graph, 0))
    start, end = check(cu.cuEventCreate(0)), check(cu.cuEventCreate(0))
    times = []
    check((*cu.cuGraphLaunch(executable, stream), 0))
    for _ in range(ROUNDS):
        check((*cu.cuEventRecord(start, stream), 0))
        check((*cu.cuGraphLaunch(executable, stream), 0))
        check((*cu.cuEventRecord(end, stream), 0))
        check((*cu.cuEventSynchronize(end), 0))
        times.append(1000 * check(cu.cuEventElapsedTime(start, end)) / LAUNCHES)
    cu.cuGraphExecDestroy(executable)
    cu.cuGraphDestroy(graph)
    for resource in keep:
        if isinstance(resource, cu.CUmodule):
            cu.cuModuleUnload(resource)
    return statistics.median(times)


def load(image: bytes, symbol: str, shared: int, keep: list[Any]) -> Any:
    """Loads the image and returns the kernel's function."""
    module = check(cu.cuModuleLoadData(image))
    keep.append(module)
    function = check(cu.cuModuleGetFunction(module, symbol.encode()))
    if shared > 48 << 10:
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check((*cu.cuFuncSetAttribute(function, attribute, shared), 0))
    return function


def packed(layout: Any, params: Any, arguments: Any, room: int, at: int) -> tuple[Any, int]:
    """Returns the parameter block with pointers from `at` on, and the next free offset."""
    block = ctypes.create_string_buffer(max(offset + size for offset, size in layout))
    for (offset, _), (kind, _), argument in zip(layout, params, arguments, strict=False):
        if kind.startswith("*"):
            nbytes = -(-argument[1] // 256) * 256
            if at + nbytes > ROOM:
                at = 0
            struct.pack_into("<Q", block, offset, room + at)
            at += nbytes
        else:
            struct.pack_into(f"<{FORMATS[kind]}", block, offset, argument)
    return block, at


if __name__ == "__main__":
    main(*sys.argv[1:])
