"""Lower every region at every int_key in processes that see no GPU, some at a time.  The parent's side; imports no Inductor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from cgbundle.format.schema import IntKey

from ...export.torch_program import save_program, with_weights, without_weights
from ...export.weights import weight_tensors
from ...targets.build_spec import own_key
from ...targets.cuda.recorded import RegionKey
from ...targets.cuda.tensors import settings
from ...targets.program_contents import program_contents, tensor_layout
from ...util.content_cache import cache_path, recall, remember
from ...util.progress import Tell
from ...util.workers import Kind, Request, ask
from ..lowered import Lowered

Layouts = tuple[tuple[int, ...] | None, ...]
"""Of each output the strides that it must have, in elements; None for any.  () for any of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweringJob:
    """A program to lower at the sizes of `tensors`, which are like those that it takes, on the CPU.  `writes`: it writes to buffers
    or to inputs.  `live`: names of weights that may change between calls, so that nothing computed from them is kept."""

    program: ExportedProgram = field(repr=False)
    tensors: tuple[torch.Tensor, ...] = field(repr=False)
    layouts: Layouts
    writes: bool
    live: tuple[str, ...]


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


def lower_all(
    jobs: Mapping[RegionKey, LoweringJob],
    arch: str,
    folder: Path,
    *,
    code: str,
    cache: Path,
    table: Path | None,
    tell: Tell,
    seconds: float | None = None,
) -> dict[RegionKey, Lowered]:
    """Every job lowered for `arch`, in the order of `jobs`, in as many processes as there are processors.  `folder` takes working
    files and logs, `cache` what was lowered.  `code` names the model whose code registers operators that the programs call, or is
    "": what these launch may change while the programs stay the same, so that nothing is remembered.  Raises what
    `inductor.lower_key` raises, lowering-broken when a process ends without an answer, and TimeoutError when not all is done after
    so many `seconds`."""
    rest = arch, table.read_bytes() if table else b"", settings()
    about = program_contents([job.program for job in jobs.values()])
    asked = {name: ([tensor_layout(each) for each in job.tensors], job.layouts, job.writes, job.live) for name, job in jobs.items()}
    kept = {
        name: cache_path(cache, "lowered", about[id(job.program)], rest, own_key(name[1]), *asked[name])
        for name, job in jobs.items()
    }
    known: dict[RegionKey, Lowered] = {}
    if not code:
        known = {name: found for name, path in kept.items() if (found := recall(path, Lowered)) is not None}
    if len(known) == len(jobs):
        tell(f"all {len(known)} were lowered before")
    left = {name: job for name, job in jobs.items() if name not in known}
    weights = folder / "weights.pt"
    files = _saved(left.values(), folder, weights)
    requests = {}
    for name, job in left.items():
        number, path = files[id(job.program)]
        content = WorkerJob(
            program=path, weights=weights, number=number, code=code, tensors=job.tensors, layouts=job.layouts, writes=job.writes,
            live=job.live, key=own_key(name[1]), arch=arch, settings=settings(), table=table,
        )  # fmt: skip
        requests[name] = Request(content=content, what=f"lowering {name[0]} for int_key {name[1]}")
    kind = Kind(module="cgcompile.offline.lower.worker", folder=folder, died="lowering-broken")
    for name, lowered in ask(kind, requests, seconds=seconds):
        if not code:
            remember(kept[name], lowered)
        known[name] = lowered
        tell(f"lowered {name[0]} for int_key {name[1]}: {len(lowered.variants)} kernels")
    if len(known) < len(jobs):
        raise TimeoutError
    return {name: known[name] for name in jobs}


def read_program(job: WorkerJob) -> ExportedProgram:
    """The job's program; its weights are pages of the file that all workers share, read where something is computed from them.
    What those hold that may change between calls is not known."""
    program, tensors = torch.export.load(job.program), torch.load(job.weights, mmap=True, weights_only=True)[job.number]
    named = {**program.state_dict, **program.constants}
    storages: dict[int, torch.Tensor] = {}
    for name, place in tensors.items():
        if not isinstance(place, torch.Tensor):
            number, size, offset, strides = place
            storage = storages.setdefault(number, torch.empty(size, dtype=torch.uint8)).untyped_storage()
            tensors[name] = torch.empty(0, dtype=named[name].dtype).set_(storage, offset, named[name].shape, strides)
    return with_weights(program, tensors)


def _saved(jobs: Iterable[LoweringJob], folder: Path, weights: Path) -> dict[int, tuple[int, Path]]:
    """Numbers and files of the jobs' programs by identity.  Their weights, of which several programs have the same, are one more
    file: tensors; of those that may change between calls, such as caches, (number of the storage, its bytes, offset, strides)."""
    files: dict[int, tuple[int, Path]] = {}
    saved: list[dict[str, Any]] = []
    storages: dict[int, int] = {}
    for job in jobs:
        if id(job.program) not in files:
            files[id(job.program)] = len(files), folder / f"program{len(files)}.pt2"
            save_program(without_weights(job.program), files[id(job.program)][1])
            tensors: dict[str, Any] = dict(weight_tensors(job.program))
            for name in tensors.keys() & job.live:
                storage = tensors[name].untyped_storage()
                number = storages.setdefault(storage.data_ptr(), len(storages))
                tensors[name] = number, storage.nbytes(), tensors[name].storage_offset(), tensors[name].stride()
            saved.append(tensors)
    torch.save(saved, weights)
    return files
