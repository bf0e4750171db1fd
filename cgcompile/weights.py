"""Parameters, buffers and constants of an exported program: under their names in the model, tied ones once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from cgbundle import safetensors
from cgbundle.schema import Weight

from .errors import DtypeUnsupported
from .export import PREFIX, memory_order
from .trees import dtype_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """`rows` for the manifest; `tensors` for `cgbundle.safetensors.write`."""

    rows: tuple[Weight, ...]
    tensors: dict[str, safetensors.Tensor]

    @property
    def bytes(self) -> int:
        """Of the stored tensors."""
        return sum(safetensors.nbytes(dtype, shape) for dtype, shape, _ in self.tensors.values())


def collect(program: ExportedProgram) -> Weights:
    """Names are the model's own.  A weight that is dense but not row-major is stored with its axes in memory order, as its
    row's strides say.

    Raises DtypeUnsupported for dtypes without a safetensors code and for constants with gaps or overlaps.
    """
    rows: list[Weight] = []
    tensors: dict[str, safetensors.Tensor] = {}
    stored: dict[tuple[Any, ...], str] = {}
    for full, value in sorted({**program.state_dict, **tensor_constants(program)}.items()):
        name = full.removeprefix(PREFIX)
        dtype = dtype_name(value.dtype)
        if dtype not in safetensors.CODES:
            raise DtypeUnsupported(f"weight {name!r}: dtype {value.dtype} cannot be stored in a safetensors file")
        dense = value.detach().permute(memory_order(value))
        if not dense.is_contiguous():
            raise DtypeUnsupported(
                f"weight {name!r}: strides {list(value.stride())} leave gaps or overlap", "call .contiguous() on it in the model"
            )
        same = (value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape), value.stride(), dtype)
        if same not in stored or not value.numel():
            stored[same] = name
            tensors[name] = (dtype, tuple(dense.shape), _reader(dense))
        rows.append(
            Weight(
                name=name,
                tensor=stored[same],
                dtype=dtype,
                shape=tuple(value.shape),
                strides=value.stride(),
                memory="weights",
                offset=0,
            )
        )
    return Weights(rows=tuple(rows), tensors=tensors)


def tensor_constants(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Constants that are tensors: non-persistent buffers and literals in forward()."""
    return {name: value for name, value in program.constants.items() if isinstance(value, torch.Tensor)}


def _reader(value: torch.Tensor) -> Callable[[], Any]:
    def read() -> Any:
        flat = value.contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy() if flat.numel() else b""

    return read
