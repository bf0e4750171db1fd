"""The fresh process that verifies `cgcompile.save_graphs`: opens the memory of the engine's tensors at other addresses, and replays
the bundle's graphs over it while the engine waits. `python -m cgbundle.gpu.engine_replay BUNDLE PLAN`, PLAN being a `Plan` in JSON.
It fills the graphs' own memory, and undefined bytes of kernel parameters, with POISON."""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import BinaryIO, NamedTuple

from ..cuda.driver import Context, call
from ..errors import CgbundleError
from ..format.archive import Archive
from ..format.schema import Engine, EngineTensor
from ..tensors.tensor import Tensor
from ..validate.engine import span_of_tensor
from .attached import attach_poisoned

POISON = 0xA5  # fills memory that no replay may depend on
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, required to open another process's memory
Place = tuple[str, int, int]  # (name of a tensor, offset in bytes from it, size in bytes)


class Plan(NamedTuple):
    """`spans`: (handle of the allocation in hexadecimal, offset in it, address in the engine's process). `contents`: the initial
    contents of the graphs' own memory, as places with the offsets of their bytes in `file`. `graphs`: two lists for each graph. The
    first has the places that are inputs, with the offsets of their bytes in `file`; `replay` writes them before the graph. The
    second has the places that the graph changes, with the SHA-256 of their bytes afterwards."""

    device: int
    spans: list[tuple[str, int, int]]
    file: str
    contents: list[tuple[Place, int]]
    graphs: list[tuple[list[tuple[Place, int]], list[tuple[Place, str]]]]


def main(arguments: Sequence[str]) -> int:
    """Prints {"differs": text, "torch_imported": bool} or {"error": ..., "hint": ..., "code": ...}.

    If bits differ, "at" has the indices that `replay` returns, and the file `file` + ".differs" has the bytes that this process
    got."""
    path, name = arguments
    with open(name, encoding="utf-8") as file:
        plan = Plan(**json.load(file))
    try:
        differs, at = replay(path, plan)
    except CgbundleError as error:
        print(json.dumps({"error": str(error), "hint": error.hint, "code": error.code}))
        return error.exit_code
    print(json.dumps({"differs": differs, "torch_imported": "torch" in sys.modules} | ({"at": at} if at else {})))
    return 1 if differs else 0


def replay(path: str, plan: Plan) -> tuple[str, tuple[int, int] | None]:
    """Returns a text that names the first difference, or "". If bits differ, also returns the index of the graph and the index of
    the place in the second list of that graph. Raises the errors of `attach`."""
    engine = Archive(path).manifest.engine
    assert engine is not None  # the compiler wrote it
    context = Context(plan.device)
    with ExitStack() as stack:
        stack.callback(context.release)
        stack.enter_context(context)
        opened: dict[str, int] = {}
        addresses = []
        for handle, offset, theirs in plan.spans:
            if handle not in opened:
                opened[handle] = call("cuIpcOpenMemHandle", bytes.fromhex(handle), LAZY_PEER_ACCESS)
                stack.callback(call, "cuIpcCloseMemHandle", opened[handle])
            addresses.append(opened[handle] + offset)
            if addresses[-1] == theirs:
                return f"memory of the engine has address {theirs:#x} here too, so relocation cannot be tested", None
        tensors = {row.name: _tensor(engine, row, addresses, plan.device) for row in engine.tensors if row.memory == "inputs"}
        graphs = stack.enter_context(attach_poisoned(path, tensors, device=plan.device, unverified=True, poison=POISON))
        places = {name: tensor.address for name, tensor in (*tensors.items(), *graphs.tensors.items())}
        with open(plan.file, "rb") as file:
            _write(file, plan.contents, places)
            for position, (graph, (inputs, results)) in enumerate(zip(graphs.values(), plan.graphs, strict=True)):
                _write(file, inputs, places)
                graph.replay()
                call("cuCtxSynchronize")
                for number, ((name, at, size), digest) in enumerate(results):
                    held = _bytes_at(places[name] + at, size)
                    if hashlib.sha256(held).hexdigest() != digest:
                        with open(f"{plan.file}.differs", "wb") as out:
                            out.write(held)
                        text = f"graph {graph.key!r}: tensor {name!r} holds other bits than in the engine's process"
                        return text, (position, number)
    return "", None


def _write(file: BinaryIO, rows: Sequence[tuple[Place, int]], places: Mapping[str, int]) -> None:
    for (name, at, size), begin in rows:
        file.seek(begin)
        call("cuMemcpyHtoD", places[name] + at, file.read(size), size)


def _bytes_at(address: int, size: int) -> bytearray:
    data = bytearray(size)
    view = (ctypes.c_char * size).from_buffer(data)
    call("cuMemcpyDtoHAsync", ctypes.addressof(view), address, size, 0)
    call("cuStreamSynchronize", 0)
    return data


def _tensor(engine: Engine, row: EngineTensor, addresses: Sequence[int], device: int) -> Tensor:
    position = span_of_tensor(engine, row)
    assert position is not None
    address = addresses[position] + row.offset - engine.spans[position].offset
    return Tensor(address, row.dtype, row.shape, row.strides, None, device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
