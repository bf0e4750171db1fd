"""The weights of a program on their way into a bundle: their shapes, their bytes, and weights.safetensors; and which of them an
update of the loaded program must leave as they are, since what the code holds of them would stay behind."""

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

from cgbundle.format import file_names, safetensors, safetensors_writer
from cgbundle.format.schema import DTYPES, STATE, FrozenWeight, Weight
from cgbundle.format.spans import memory_order, span

from ..errors import ModelError
from ..export.programs import Programs
from ..export.weights import weight_placeholders
from ..model.flat_module import PREFIX
from ..util.raw_bytes import is_zero, raw
from .memory_layout import Shape, Table, dense_strides

WRITERS, BLOCK = 8, 16 << 20
"""Threads that write weights, and bytes that each takes from the GPU at a time.  One thread writes 16 GB into memory in 40 s: a new
page costs more than its copy."""

TABLE = "cgcompile.table."
"""How the names of tables begin: of rows of the manifest that are no weights of the model."""


def stored_dtype(tensor: torch.Tensor, what: str = "a tensor") -> str:
    """The name of a tensor's dtype in schema.DTYPES.  Raises dtype-unsupported."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.layout != torch.strided:
        raise ModelError("dtype-unsupported", f"{what} is {name} ({tensor.layout}), which a bundle cannot hold")
    return name


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
    """What `lay_out` needs.  Tensors that are the same memory are tied; gaps and overlaps inside a tensor are closed."""
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
    """The bytes of a tensor in the order of memory that `strides` (dense, in elements) describe."""
    return bytes(_bytes(tensor, strides))


def contents_sha256(tensor: torch.Tensor) -> bytes:
    """The SHA-256 of a tensor's bytes, in the order that they have in memory.  Zeros are not read one by one."""
    if is_zero(tensor):
        return bytes.fromhex(_zeros_digest(tensor.nbytes))
    return sha256(_bytes(tensor, tensor.stride())).digest()


def _bytes(tensor: torch.Tensor, strides: Iterable[int]) -> memoryview:
    """What `contents` gives, not copied where the tensor is on the host and lies so."""
    return memoryview(_in_order(tensor, strides).cpu().numpy())


def _in_order(tensor: torch.Tensor, strides: Iterable[int]) -> torch.Tensor:
    """The bytes in the order of memory that `strides` describe, uint8, where the tensor is."""
    order = sorted(range(tensor.dim()), key=lambda axis: -tuple(strides)[axis])
    return raw(tensor.detach().permute(order))


def row_major(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in row-major order."""
    return contents(tensor.contiguous(), tensor.contiguous().stride())


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor], placed: Iterable[Weight]) -> tuple[Weight, ...]:
    """weights.safetensors: the tensors as `lay_out` placed them.  `tensors` and `placed` have the program's names.  Returns the
    manifest's rows, under the model's own.  A weight that is not row-major is stored with its axes in memory order.  Wherever the
    tensors are, the host holds a few blocks of them.  State of zeros takes no bytes: a cache may be larger than the model."""
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
        places = safetensors_writer.write_header(file, shapes)
        file.flush()
        with ThreadPoolExecutor(WRITERS) as threads:
            for _ in threads.map(lambda name: _write(file.fileno(), places[name], _in_order(*stored[name])), places):
                pass  # what failed is raised
    return tuple(rows)


def _write(file: int, place: int, data: torch.Tensor) -> None:
    """Writes bytes (uint8), which may be on a GPU, to a place of a file."""
    block = torch.empty(min(BLOCK, data.numel()), dtype=torch.uint8, pin_memory=True) if data.is_cuda else None
    for part in data.split(BLOCK):
        here = part if block is None else block[: part.numel()].copy_(part)
        view = memoryview(here.numpy())
        while view:
            written = os.pwrite(file, view, place)
            place, view = place + written, view[written:]


def write_tables(path: Path, tables: Sequence[Table]) -> tuple[Weight, ...]:
    """tables.safetensors, which holds them as TABLE and a number; returns the manifest's rows.  Without tables there is no file.

    Weights of one model are the same file whatever the sizes, tables are not."""
    if not tables:
        return ()
    rows = [
        Weight(
            name=f"{TABLE}{index}", tensor=f"{TABLE}{index}", dtype="uint8", shape=(len(table.contents),),
            strides=(1,), offset=table.offset, computed=True,
        )
        for index, table in enumerate(tables)
    ]  # fmt: skip
    stored: dict[str, safetensors_writer.Tensor] = {
        row.tensor: (row.dtype, row.shape, partial(bytes, table.contents)) for row, table in zip(rows, tables, strict=True)
    }
    with open(path, "wb") as file:
        safetensors_writer.write(file, stored)
    return tuple(rows)


def frozen_weights(
    stage: Path,
    rows: Sequence[Weight],
    programs: Programs,
    folded: Collection[str],
    baked: Mapping[str, str],
) -> tuple[FrozenWeight, ...]:
    """The rows of the manifest, whose files of weights and tables are in `stage`.  `folded`: names in the programs of weights from
    which something was computed that compiled code holds; `baked`: as `BuildSpec` has them.  Of
    weights that are tied, all are fixed or none."""
    named = {name for _, program in programs.distinct for name in program.state_dict}
    plain_named, plain_folded = [{name.removeprefix(PREFIX) for name in names} for names in (named, folded)]
    updatable = {row.tensor for row in rows if row.name in plain_named}
    held = {row.tensor for row in rows if row.name in plain_folded}
    read = {row.tensor: baked[row.name] for row in reversed(rows) if row.name in baked}
    frozen_rows = []
    files = [file_names.WEIGHTS, *([file_names.TABLES] if any(row.computed for row in rows) else [])]
    mapped = {name: safetensors.Mapped(str(stage / name), name) for name in files}
    for index, row in enumerate(rows):
        if row.memory == STATE or row.tensor not in updatable:
            reason: Literal["state", "constant", "baked", "folded"] | None = "state" if row.memory == STATE else "constant"
        else:
            reason = "baked" if row.tensor in read else "folded" if row.tensor in held else None
        if reason is not None:
            file = file_names.TABLES if row.computed else file_names.WEIGHTS
            digest = _zeros_digest(span(row)) if row.zeros else sha256(mapped[file].data(row.tensor)).hexdigest()
            where = read[row.tensor] if reason == "baked" else ""
            frozen_rows.append(FrozenWeight(weight=index, reason=reason, sha256=digest, where=where))
    for mapped_file in mapped.values():
        mapped_file.close()
    return tuple(frozen_rows)


@cache
def _zeros_digest(size: int) -> str:
    """The SHA-256 of `size` zeros; layers' caches are of one size."""
    digest, zeros = sha256(), bytes(1 << 20)
    for _ in range(size >> 20):
        digest.update(zeros)
    digest.update(zeros[: size & ((1 << 20) - 1)])
    return digest.hexdigest()


def unbound(program: ExportedProgram, bound: Collection[str]) -> set[str]:
    """The weights, by their names in the program, that its results depend on and whose memory compiled code does not read: it holds
    what they were.  `bound`: names of those that it reads."""
    tensors = {name: _place(value) for name, value in {**program.state_dict, **program.constants}.items() if _is_tensor(value)}
    read = {tensors[name] for name in bound}
    return {name for name in used_weights(program) if tensors[name] not in read}


def used_weights(program: ExportedProgram) -> set[str]:
    """The weights, by their names in the program, that a result or something written depends on."""
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


def _place(value: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are tied."""
    return (value.data_ptr(), value.dtype, tuple(value.shape), value.stride()) if value.numel() else (id(value),)
