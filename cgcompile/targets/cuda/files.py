"""The files and rows of a cuda bundle that both recorders write alike: weights, kernel images, graph tables, programs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from cgbundle.format import safetensors
from cgbundle.format.schema import IntKey, Program, Step, Value, Weight
from cgbundle.tables import codec as tables
from cgbundle.tables.recording import Recording
from cgbundle.tensors.tensor import memory_order

from ...model.flat_module import PREFIX
from .memory_layout import Table
from .tensors import contents


def write_weights(
    path: Path, tensors: Mapping[str, torch.Tensor], placed: Iterable[Weight], constants: Sequence[Table] = ()
) -> tuple[Weight, ...]:
    """weights.safetensors: the program's tensors as `memory.lay_out` placed them, and the tables behind them as
    `cgcompile.table.N`.  Returns the manifest's rows, under the model's own names."""
    rows: list[Weight] = []
    stored: dict[str, safetensors.Tensor] = {}
    for row in placed:
        order = memory_order(row.shape, row.strides)
        tensor = row.tensor.removeprefix(PREFIX)
        stored[tensor] = (row.dtype, tuple(row.shape[axis] for axis in order), _reader(tensors[row.tensor], row.strides))
        rows.append(
            Weight(
                name=row.name.removeprefix(PREFIX),
                tensor=tensor,
                dtype=row.dtype,
                shape=row.shape,
                strides=row.strides,
                memory=row.memory,
                offset=row.offset,
            )
        )
    for index, table in enumerate(constants):
        name, size = f"cgcompile.table.{index}", len(table.contents)
        stored[name] = ("uint8", (size,), partial(bytes, table.contents))
        rows.append(
            Weight(name=name, tensor=name, dtype="uint8", shape=(size,), strides=(1,), memory="weights", offset=table.offset)
        )
    with open(path, "wb") as file:
        safetensors.write(file, stored)
    return tuple(rows)


def write_kernels(stage: Path, images: Mapping[str, bytes]) -> None:
    """kernels/<sha256>, each image once."""
    (stage / "kernels").mkdir()
    for name, image in images.items():
        assert hashlib.sha256(image).hexdigest() == name, name
        (stage / "kernels" / name).write_bytes(image)


def write_tables(stage: Path, recordings: Mapping[tuple[str, IntKey], Recording]) -> dict[tuple[str, IntKey], str]:
    """graphs/<region>-<key>.bin of every region and int_key; returns their paths in the bundle."""
    (stage / "graphs").mkdir()
    files = {}
    for (region, key), recording in recordings.items():
        file = files[region, key] = f"graphs/{region}-{'x'.join(map(str, key)) or 'fixed'}.bin"
        (stage / file).write_bytes(tables.encode(recording))
    return files


def program(key: IntKey, inputs: Sequence[Value], outputs: Sequence[Value], file: str, arena: int, static: int) -> Program:
    """The manifest's row of an int_key that is one graph."""
    given, made = tuple(range(len(inputs))), tuple(range(len(inputs), len(inputs) + len(outputs)))
    step = Step(kind="graph", region=0, file=file, inputs=given, outputs=made)
    return Program(key=key, values=(*inputs, *outputs), inputs=given, outputs=made, steps=(step,), arena=arena, static=static)


def _reader(tensor: torch.Tensor, strides: tuple[int, ...]) -> Callable[[], bytes]:
    return partial(contents, tensor, strides)
