"""The request to a lowering worker, and its program with weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from cgbundle.format.schema import IntKey

from ...export.torch_program import with_weights

Layouts = tuple[tuple[int, ...] | None, ...]
"""The strides that each output must have, in elements, or None; () if none is fixed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerJob:
    """A job as a worker receives it.  `program`: a file without weights.  Its weights are element `number` of the list in the file
    `weights`.  `code`: see `lower_all`.  `settings`: torch's settings that select kernels.  `table`: the file of measured
    configurations, or None to use the cost model."""

    program: Path
    weights: Path
    number: int
    code: str
    tensors: tuple[torch.Tensor, ...]
    layouts: Layouts
    writes: bool
    live: tuple[str, ...]
    key: IntKey
    arch: str
    settings: Mapping[str, Any]
    table: Path | None


def read_program(job: WorkerJob) -> ExportedProgram:
    """Loads the job's program.  Maps its weights from the file, which all workers share."""
    return program_of(job, torch.load(job.weights, mmap=True, weights_only=True)[job.number])


def program_of(job: WorkerJob, saved: Mapping[str, Any]) -> ExportedProgram:
    """Loads the job's program with weights from `jobs._saved`.  Weights that may change between calls have undefined contents."""
    program, tensors = torch.export.load(job.program), dict(saved)
    named = {**program.state_dict, **program.constants}
    storages: dict[int, torch.Tensor] = {}
    for name, place in tensors.items():
        if not isinstance(place, torch.Tensor):
            number, size, offset, strides = place
            storage = storages.setdefault(number, torch.empty(size, dtype=torch.uint8)).untyped_storage()
            tensors[name] = torch.empty(0, dtype=named[name].dtype).set_(storage, offset, named[name].shape, strides)
    return with_weights(program, tensors)
