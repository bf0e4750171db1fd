"""What a process that lowers is asked for, and its program with weights."""

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
"""Of each output the strides that it must have, in elements; None for any.  () for any of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerJob:
    """A job as a worker is asked for it: `program` is a file without weights, which are those of number `number` in the file
    `weights`; `code` registers operators that it calls, "" for none.
    `settings`: torch's switches that choose kernels; `table`: the file of measured configurations, or None for Inductor's offers
    ranked by the model of cost."""

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
    """The job's program; its weights are pages of the file that all workers share, read where something is computed from them."""
    return program_of(job, torch.load(job.weights, mmap=True, weights_only=True)[job.number])


def program_of(job: WorkerJob, saved: Mapping[str, Any]) -> ExportedProgram:
    """The job's program with weights as `_saved` gives them.  What those hold that may change between calls is not known."""
    program, tensors = torch.export.load(job.program), dict(saved)
    named = {**program.state_dict, **program.constants}
    storages: dict[int, torch.Tensor] = {}
    for name, place in tensors.items():
        if not isinstance(place, torch.Tensor):
            number, size, offset, strides = place
            storage = storages.setdefault(number, torch.empty(size, dtype=torch.uint8)).untyped_storage()
            tensors[name] = torch.empty(0, dtype=named[name].dtype).set_(storage, offset, named[name].shape, strides)
    return with_weights(program, tensors)
