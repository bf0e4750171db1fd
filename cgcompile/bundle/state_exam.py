"""What a call leaves in state, for the exam: the elements that changed, as runs.

A cache of a few hundred MB changes in a few rows per call; the exam of every int_key would otherwise hold it in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cgbundle.format import safetensors
from cgbundle.format.schema import DTYPES, Weight

from ..model.pytree import dtype_name
from ..util.raw_bytes import raw

Changed = tuple[int, torch.Tensor, torch.Tensor]
"""Position of a weight; pairs [first element, number of elements] in memory order, int64 [runs, 2]; these elements, [elements]."""


def changed(rows: Sequence[Weight], before: Mapping[str, torch.Tensor], after: Mapping[str, bytes]) -> tuple[Changed, ...]:
    """The runs of every row of memory state.  `before`: what the weights held, by name; `after`: the bytes of the rows of state in
    memory order, by name."""
    found = []
    for index, row in enumerate(rows):
        if row.memory == "state":
            found.append((index, *_runs(_flat(before[row.name], row), _from_bytes(after[row.name], row))))
    return tuple(found)


def in_memory(value: torch.Tensor, row: Weight) -> bytes:
    """The bytes of a tensor in the order of memory that the row's strides say."""
    return raw(_flat(value, row)).numpy().tobytes()


def entries(found: Sequence[Changed]) -> list[tuple[str, int, safetensors.Tensor]]:
    """(kind, position of the weight, tensor) for `archive.exam_entry` and `safetensors.write`."""
    rows = []
    for index, runs, elements in found:
        rows += [("state-at", index, _stored(runs)), ("state", index, _stored(elements))]
    return rows


def _runs(before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where two flat tensors differ in a bit."""
    if not after.numel():
        return torch.zeros(0, 2, dtype=torch.int64), after
    width = DTYPES[dtype_name(after.dtype)]
    pairs = [raw(value).reshape(-1, width) for value in (before, after)]
    differ = (pairs[0] != pairs[1]).any(dim=1)
    edges = torch.diff(torch.nn.functional.pad(differ.to(torch.int8), (1, 1)))
    first, end = (edges == 1).nonzero().reshape(-1), (edges == -1).nonzero().reshape(-1)
    return torch.stack([first, end - first], dim=1), after[differ]


def _flat(value: torch.Tensor, row: Weight) -> torch.Tensor:
    order = sorted(range(value.dim()), key=lambda axis: (-row.strides[axis], axis))
    return value.detach().cpu().permute(order).contiguous().reshape(-1)


def _from_bytes(data: bytes, row: Weight) -> torch.Tensor:
    kind = getattr(torch, row.dtype)
    return torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)


def _stored(value: torch.Tensor) -> safetensors.Tensor:
    return dtype_name(value.dtype), tuple(value.shape), lambda: raw(value).numpy()
