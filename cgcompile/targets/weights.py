"""Writes the weights of a program to weights.safetensors.  Lists the weights that an update of a loaded program cannot replace,
for example because compiled code holds values derived from them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from cgbundle.format import file_names, safetensors_files
from cgbundle.format.schema import DTYPES, STATE, FrozenWeight, Weight
from cgbundle.format.shapes import memory_order, span

from ..errors import ModelError
from ..export.programs import Programs
from ..export.weights import weight_placeholders
from ..model.flat_module import PREFIX
from ..util.raw_bytes import is_zero, raw
from .memory_layout import Shape, Table, dense_strides

WRITERS, BLOCK = 8, 16 << 20
"""The threads that write weights, and the bytes that each copies from the GPU at a time.  One thread writes 16 GB to memory in 40
s: the first touch of a page costs more than the copy."""

TABLE = "cgcompile.table."
"""Prefix of the names of tables: rows of the manifest that are not weights of the model."""


def stored_dtype(tensor: torch.Tensor, what: str = "a tensor") -> str:
    """Returns the name of a tensor's dtype in schema.DTYPES.  Raises dtype-unsupported."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.layout != torch.strided:
        raise ModelError("dtype-unsupported", f"{what} is {name} ({tensor.layout}), which a bundle cannot hold")
    return name


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
    """Returns the argument `shapes` of `lay_out`.  Tensors with the same memory are tied.  Strides with gaps or overlaps become
    dense."""
    first: dict[Any, str] = {}
    shapes = {}
    for name, tensor in tensors.items():
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        owner = first.setdefault(identity, name)
        shape, strides = tuple(tensor.shape), dense_strides(tuple(tensor.shape), tensor.stride())
        dtype = stored_dtype(tensor, f"weight {name.removeprefix(PREFIX)!r}")
        shapes[name] = Shape(dtype=dtype, shape=shape, strides=strides, same_as="" if owner == name else owner)
    return shapes


def contents(tensor: torch.Tensor, strides: Iterable[int]) -> bytes:
    """Returns the bytes of a tensor in the memory order of `strides`, which are dense and in elements."""
    return bytes(_bytes(tensor, strides))


def contents_sha256(tensor: torch.Tensor) -> bytes:
    """Returns the SHA-256 of a tensor's bytes in memory order.  A tensor of zeros gets a cached digest of its size."""
    if is_zero(tensor):
        return bytes.fromhex(_zeros_digest(tensor.nbytes))
    return sha256(_bytes(tensor, tensor.stride())).digest()


def _bytes(tensor: torch.Tensor, strides: Iterable[int]) -> memoryview:
    """Returns the bytes of `contents`, without a copy if the tensor is on the host in that order."""
    return memoryview(_in_order(tensor, strides).cpu().numpy())


def _in_order(tensor: torch.Tensor, strides: Iterable[int]) -> torch.Tensor:
    """Returns the bytes in the memory order of `strides` as uint8, on the tensor's device."""
    order = sorted(range(tensor.dim()), key=lambda axis: -tuple(strides)[axis])
    return raw(tensor.detach().permute(order))


def row_major(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of a tensor in row-major order."""
    return contents(tensor.contiguous(), tensor.contiguous().stride())


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor], placed: Iterable[Weight]) -> tuple[Weight, ...]:
    """Writes `tensors` to weights.safetensors, and returns the manifest's rows.  `placed`: the rows of `lay_out`.  Arguments use
    the program's names, the result the model's names.  A weight that is not row-major is stored with its axes in memory order.
    The host holds only a few blocks at a time.  State of zeros is not stored, because a cache may be larger than the model."""
    rows: list[Weight] = []
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    stored: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}
    for row in placed:
        shape = tuple([row.shape[axis] for axis in memory_order(row.shape, row.strides)])
        tensor = row.tensor.removeprefix(PREFIX)
        zeros = row.memory == STATE and is_zero(tensors[row.tensor])
        if not zeros:
            shapes[tensor], stored[tensor] = (row.dtype, shape), (tensors[row.tensor], row.strides)
        rows.append(replace(row, name=row.name.removeprefix(PREFIX), tensor=tensor, zeros=zeros))
    with open(path, "wb") as file:
        places = safetensors_files.write_header(file, shapes)
        file.flush()
        with ThreadPoolExecutor(WRITERS) as threads:
            for _ in threads.map(lambda name: _write(file.fileno(), places[name], _in_order(*stored[name])), places):
                pass  # raises the errors of the threads
    return tuple(rows)


def _write(file: int, place: int, data: torch.Tensor) -> None:
    """Writes uint8 data, which may be on a GPU, at offset `place` of a file."""
    block = torch.empty(min(BLOCK, data.numel()), dtype=torch.uint8, pin_memory=True) if data.is_cuda else None
    for part in data.split(BLOCK):
        host_block = part if block is None else block[: part.numel()].copy_(part)
        view = memoryview(host_block.numpy())
        while view:
            written = os.pwrite(file, view, place)
            place, view = place + written, view[written:]


def write_tables(path: Path, tables: Sequence[Table]) -> tuple[Weight, ...]:
    """Writes tables.safetensors, and returns the rows of the manifest, named TABLE and a number.  Without tables, writes no file.

    They are not in weights.safetensors, because tables depend on the sizes, and weights do not."""
    if not tables:
        return ()
    rows = [
        Weight(
            name=f"{TABLE}{index}", tensor=f"{TABLE}{index}", dtype="uint8", shape=(len(table.contents),),
            strides=(1,), offset=table.offset, computed=True,
        )
        for index, table in enumerate(tables)
    ]  # fmt: skip
    stored: dict[str, safetensors_files.Tensor] = {
        row.tensor: (row.dtype, row.shape, partial(bytes, table.contents)) for row, table in zip(rows, tables, strict=True)
    }
    with open(path, "wb") as file:
        safetensors_files.write(file, stored)
    return tuple(rows)


def frozen_weights(
    stage: Path,
    rows: Sequence[Weight],
    programs: Programs,
    folded: Collection[str],
    baked: Mapping[str, str],
) -> tuple[FrozenWeight, ...]:
    """Returns the manifest rows of weights that an update cannot replace.  `stage` has the files of weights and tables.  `folded`:
    the programs' names of the weights from which values in the compiled code were computed.  `baked`: as in `BuildSpec`.  Tied
    weights are frozen together."""
    named = {name for _, program in programs.distinct for name in program.state_dict}
    plain_named, plain_folded = [{name.removeprefix(PREFIX) for name in names} for names in (named, folded)]
    updatable = {row.tensor for row in rows if row.name in plain_named}
    folded_tensors = {row.tensor for row in rows if row.name in plain_folded}
    baked_lines = {row.tensor: baked[row.name] for row in reversed(rows) if row.name in baked}
    frozen_rows = []
    files = [file_names.WEIGHTS, *([file_names.TABLES] if any(row.computed for row in rows) else [])]
    mapped = {name: safetensors_files.Mapped(str(stage / name), name) for name in files}
    for index, row in enumerate(rows):
        if row.memory == STATE or row.tensor not in updatable:
            reason: Literal["state", "constant", "baked", "folded"] | None = "state" if row.memory == STATE else "constant"
        else:
            reason = "baked" if row.tensor in baked_lines else "folded" if row.tensor in folded_tensors else None
        if reason is not None:
            file = file_names.TABLES if row.computed else file_names.WEIGHTS
            digest = _zeros_digest(span(row)) if row.zeros else sha256(mapped[file].data(row.tensor)).hexdigest()
            where = baked_lines[row.tensor] if reason == "baked" else ""
            frozen_rows.append(FrozenWeight(weight=index, reason=reason, sha256=digest, where=where))
    for mapped_file in mapped.values():
        mapped_file.close()
    return tuple(frozen_rows)


@cache
def _zeros_digest(size: int) -> str:
    """Returns the SHA-256 of `size` zero bytes.  The result is cached, because all layers of a model have KV caches of one size."""
    digest, zeros = sha256(), bytes(1 << 20)
    for _ in range(size >> 20):
        digest.update(zeros)
    digest.update(zeros[: size & ((1 << 20) - 1)])
    return digest.hexdigest()


def unbound(program: ExportedProgram, bound: Collection[str]) -> set[str]:
    """Returns the program's names of the weights on which its results depend, but which compiled code does not read.  The code
    holds values computed from these weights.  `bound`: the names of the weights that the code reads."""
    tensors = {name: _memory_key(value) for name, value in {**program.state_dict, **program.constants}.items() if _is_tensor(value)}
    read = {tensors[name] for name in bound}
    return {name for name in used_weights(program) if tensors[name] not in read}


def used_weights(program: ExportedProgram) -> set[str]:
    """Returns the program's names of the weights on which an output or a write depends."""
    names = weight_placeholders(program)
    waiting = [node for node in program.graph.nodes if node.op == "output" or _writes(node)]
    seen = set(waiting)
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return {names[node.name] for node in seen if node.name in names}


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _memory_key(value: torch.Tensor) -> tuple[object, ...]:
    """Returns a key that is equal for tied tensors."""
    return (value.data_ptr(), value.dtype, tuple(value.shape), value.stride()) if value.numel() else (id(value),)
