"""A fresh process that replays an engine's graphs over tensors of its own, and compares what they hold then: the verification of
`cgcompile.save_graphs`.  `python -m cgbundle.gpu.engine_replay BUNDLE PLAN`, the plan as `Plan` has it, in JSON.

Everything that the graphs may not rely on is poisoned: their own memory, and the bytes of parameters that no kernel reads.  The
tensors lie at multiples of their alignment, and of no more.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from ..cuda.driver import Context, call
from ..cuda.memory import allocate
from ..errors import CgbundleError
from ..format.archive import Archive
from ..format.schema import DTYPES, Engine, EngineTensor
from ..format.spans import span_of
from ..tensors.tensor import Tensor, copy
from ..validate.engine import span_of_tensor
from .attached import AttachedGraphs, attach_poisoned

POISON = 0xA5
"""What fills memory that no replay may rely on."""

CHUNK = 64 << 20
"""Bytes that are copied and hashed at a time."""


class Plan(NamedTuple):
    """`contents`: a file with the bytes of every span, in order, then those of every tensor in memory arena, row-major.  `graphs`:
    of each graph, in order, what tensors hold after it, as SHA-256: {"spans": {position: hash}, "tensors": {name: hash}}.  Spans
    that stand in none of them keep their contents.  `poisoned`: the tensors in memory arena begin as POISON, not as in the file."""

    device: int
    contents: str
    graphs: list[dict[str, dict[str, str]]]
    poisoned: bool


def main(arguments: Sequence[str]) -> int:
    """Prints {"differs": what does, or ""} or {"error": ..., "hint": ..., "code": ...}."""
    path, name = arguments
    with open(name, encoding="utf-8") as file:
        plan = Plan(**json.load(file))
    try:
        differs = replay(path, plan)
    except CgbundleError as error:
        print(json.dumps({"error": str(error), "hint": error.hint, "code": error.code}))
        return error.exit_code
    print(json.dumps({"differs": differs, "torch_imported": "torch" in sys.modules}))
    return 1 if differs else 0


def replay(path: str, plan: Plan) -> str:
    """What differs after a replay of every graph, in words, or "".  Raises what `attach` does."""
    manifest = Archive(path).manifest
    engine = manifest.engine
    assert engine is not None  # the compiler wrote it
    context = Context(plan.device)
    with ExitStack() as stack:
        stack.callback(context.release)
        stack.enter_context(context)
        addresses = []
        for row in engine.spans:
            base = allocate(row.bytes + 2 * row.alignment, "a span of the engine's tensors")
            stack.callback(call, "cuMemFree", base)
            addresses.append(base + row.alignment)
        with open(plan.contents, "rb") as file:
            for row, address in zip(engine.spans, addresses, strict=True):
                _fill(file, address, row.bytes)
            tensors = {row.name: _tensor(engine, row, addresses, plan.device) for row in engine.tensors if row.memory == "inputs"}
            graphs = stack.enter_context(attach_poisoned(path, tensors, device=plan.device, unverified=True, poison=POISON))
            for name, tensor in graphs.tensors.items() if not plan.poisoned else ():
                _write(tensor, file.read(_bytes(tensor)), name)
        return _compared(engine, graphs, plan, addresses)


def _compared(engine: Engine, graphs: AttachedGraphs, plan: Plan, addresses: Sequence[int]) -> str:
    names = {span_of_tensor(engine, row): row.name for row in reversed(engine.tensors) if row.memory == "inputs"}
    for graph, expected in zip(graphs.values(), plan.graphs, strict=True):
        graph.replay()
        call("cuCtxSynchronize")
        for text, digest in expected["spans"].items():
            number = int(text)
            if hashed(addresses[number], engine.spans[number].bytes) != digest:
                return f"graph {graph.key!r}: tensor {names[number]!r} holds other bits than in the engine's process"
        for name, digest in expected["tensors"].items():
            if hashlib.sha256(_read(graphs.tensors[name])).hexdigest() != digest:
                return f"graph {graph.key!r}: tensor {name!r} holds other bits than in the engine's process"
    changed = {int(text) for expected in plan.graphs for text in expected["spans"]}
    begin = 0
    with open(plan.contents, "rb") as file:
        for number, row in enumerate(engine.spans):
            file.seek(begin)
            if number not in changed and hashed(addresses[number], row.bytes) != _hashed_file(file, row.bytes):
                return f"tensor {names[number]!r} was changed, and was not in the engine's process"
            begin += row.bytes
    return ""


def hashed(address: int, size: int) -> str:
    """SHA-256 of memory of the GPU."""
    digest = hashlib.sha256()
    for begin in range(0, size, CHUNK):
        digest.update(_bytes_at(address + begin, min(CHUNK, size - begin)))
    return digest.hexdigest()


def _hashed_file(file: Any, size: int) -> str:
    digest = hashlib.sha256()
    while size:
        part = file.read(min(CHUNK, size))
        digest.update(part)
        size -= len(part)
    return digest.hexdigest()


def _bytes_at(address: int, size: int) -> bytearray:
    data = bytearray(size)
    view = (ctypes.c_char * size).from_buffer(data)
    call("cuMemcpyDtoHAsync", ctypes.addressof(view), address, size, 0)
    call("cuStreamSynchronize", 0)
    return data


def _fill(file: Any, address: int, size: int) -> None:
    for begin in range(0, size, CHUNK):
        part = file.read(min(CHUNK, size - begin))
        call("cuMemcpyHtoD", address + begin, part, len(part))


def _tensor(engine: Engine, row: EngineTensor, addresses: Sequence[int], device: int) -> Tensor:
    position = span_of_tensor(engine, row)
    assert position is not None
    address = addresses[position] + row.offset - engine.spans[position].offset
    return Tensor(address, row.dtype, row.shape, row.strides, None, device)


def _near(tensor: Tensor, memory: bytearray) -> Tensor:
    """A tensor of the CPU that is laid out alike, over `memory`."""
    address = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
    return Tensor(address, tensor.dtype, tensor.shape, tensor.strides, memory)


def _read(tensor: Tensor) -> bytes:
    """Elements of a tensor of the GPU, row-major."""
    return _near(tensor, _bytes_at(tensor.address, span_of(tensor.dtype, tensor.shape, tensor.strides))).tobytes()


def _write(tensor: Tensor, data: bytes, name: str) -> None:
    from ..tensors.tensor import from_bytes

    memory = _bytes_at(tensor.address, span_of(tensor.dtype, tensor.shape, tensor.strides))
    copy(_near(tensor, memory), from_bytes(data, tensor.dtype, tensor.shape))
    call("cuMemcpyHtoD", tensor.address, bytes(memory), len(memory), detail=name)


def _bytes(tensor: Tensor) -> int:
    size = DTYPES[tensor.dtype]
    for length in tensor.shape:
        size *= length
    return size


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
