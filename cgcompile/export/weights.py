"""Parameters, buffers and constants of an exported program: under their names in the model, tied ones once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from cgbundle.format import safetensors
from cgbundle.format.schema import Weight

from ..errors import ModelError
from ..model.flat_module import PREFIX
from ..model.pytree import dtype_name
from .exported import memory_order

_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """`rows` for the manifest; `tensors` for `cgbundle.format.safetensors.write`."""

    rows: tuple[Weight, ...]
    tensors: dict[str, safetensors.Tensor]

    @property
    def memories(self) -> tuple[tuple[str, int], ...]:
        """The bytes of memory weights, and of memory state where there is any."""
        sizes = {name: safetensors.nbytes(dtype, shape) for name, (dtype, shape, _) in self.tensors.items()}
        state = {row.tensor: row.offset + sizes[row.tensor] for row in self.rows if row.memory == "state"}
        kept = sum(size for name, size in sizes.items() if name not in state)
        return (("weights", kept), *((("state", max(state.values())),) if state else ()))


def collect(program: ExportedProgram, state: Collection[str] = ()) -> Weights:
    """Names are the model's own.  A weight that is dense but not row-major is stored with its axes in memory order, as its
    row's strides say.  `state`: buffers that the program writes to, by their names in it, which share memory with no other.

    Raises dtype-unsupported for dtypes without a safetensors code and for constants with gaps or overlaps.
    """
    rows: list[Weight] = []
    tensors: dict[str, safetensors.Tensor] = {}
    stored: dict[tuple[Any, ...], str] = {}
    end = 0
    for full, value in sorted(weight_tensors(program).items()):
        name = full.removeprefix(PREFIX)
        dtype = dtype_name(value.dtype)
        if dtype not in safetensors.CODES:
            raise ModelError("dtype-unsupported", f"weight {name!r}: dtype {value.dtype} cannot be stored in a safetensors file")
        dense = value.detach().permute(memory_order(value))
        if not dense.is_contiguous():
            raise ModelError(
                "dtype-unsupported",
                f"weight {name!r}: strides {list(value.stride())} leave gaps or overlap",
                "call .contiguous() on it in the model",
            )
        same = (value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape), value.stride(), dtype)
        if same not in stored or not value.numel():
            stored[same] = name
            tensors[name] = (dtype, tuple(dense.shape), _reader(dense))
        changes = full in state
        rows.append(
            Weight(
                name=name,
                tensor=stored[same],
                dtype=dtype,
                shape=tuple(value.shape),
                strides=value.stride(),
                memory="state" if changes else "weights",
                offset=end if changes else 0,
            )
        )
        if changes:
            end += -(-safetensors.nbytes(dtype, value.shape) // safetensors.ALIGNMENT) * safetensors.ALIGNMENT
    return Weights(rows=tuple(rows), tensors=tensors)


def weight_placeholders(program: ExportedProgram) -> dict[str, str]:
    """Name of a placeholder -> name of its parameter, buffer or constant in the program."""
    return {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs if spec.kind in _KINDS}


def weight_tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Parameters, buffers and constants by their names in the program."""
    return {**program.state_dict, **tensor_constants(program)}


def tensor_constants(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Constants that are tensors: non-persistent buffers and literals in forward()."""
    return {name: value for name, value in program.constants.items() if isinstance(value, torch.Tensor)}


def _reader(value: torch.Tensor) -> Callable[[], Any]:
    def read() -> Any:
        flat = value.contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy() if flat.numel() else b""

    return read
