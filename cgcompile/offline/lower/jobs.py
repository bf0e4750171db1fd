"""Lowers every region at every int_key in parallel worker processes that see no GPU.  This module runs in the parent.  If no GPU is
visible to it, the workers are forked from it, and share its torch, Inductor and weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from ...errors import BuildError
from ...export.torch_program import save_program, without_weights
from ...export.weights import weight_tensors
from ...model.user_code import first_line
from ...targets.build_spec import own_key
from ...targets.cuda.recorded import RegionKey
from ...targets.cuda.tensors import settings
from ...targets.program_contents import program_contents, tensor_layout
from ...util.content_cache import cache_path, recall, remember
from ...util.garbage_collection import quick_imports
from ...util.progress import Tell
from ...util.workers import Kind, Request, ask, processors, run_forked
from ..lowered import Lowered
from .worker_job import Layouts, WorkerJob, program_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweringJob:
    """A program to lower at the sizes of `tensors`, which are example inputs on the CPU.  `writes`: the program writes to buffers
    or inputs.  `live`: names of weights that may change between calls, so that no constants are folded from them."""

    program: ExportedProgram = field(repr=False)
    tensors: tuple[torch.Tensor, ...] = field(repr=False)
    layouts: Layouts
    writes: bool
    live: tuple[str, ...]


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
    """Lowers every job for `arch`, with one process per processor; returns the results in the order of `jobs`.  `folder`: for
    working files and logs.  `cache`: for lowered programs.  `code`: see `inlining.code_of`.  With `code` nothing is cached, because
    the operators' kernels may change while the programs stay the same.  Raises the errors of `inductor.lower_key`, lowering-broken
    if a process ends without a result, and TimeoutError after `seconds`."""
    common = arch, table.read_bytes() if table else b"", settings()
    digests = program_contents([job.program for job in jobs.values()])
    parameters = {
        name: ([tensor_layout(tensor) for tensor in job.tensors], job.layouts, job.writes, job.live) for name, job in jobs.items()
    }
    cache_paths = {
        name: cache_path(cache, "lowered", digests[id(job.program)], common, own_key(name[1]), *parameters[name])
        for name, job in jobs.items()
    }
    lowered_jobs: dict[RegionKey, Lowered] = {}
    if not code:
        lowered_jobs = {name: recalled for name, path in cache_paths.items() if (recalled := recall(path, Lowered)) is not None}
    if len(lowered_jobs) == len(jobs):
        tell(f"all {len(lowered_jobs)} were lowered before")
    remaining = {name: job for name, job in jobs.items() if name not in lowered_jobs}
    weights = folder / "weights.pt"
    files, saved = _saved(remaining.values(), folder)
    contents = {}
    for name, job in remaining.items():
        number, path = files[id(job.program)]
        contents[name] = WorkerJob(
            program=path, weights=weights, number=number, code=code, tensors=job.tensors, layouts=job.layouts, writes=job.writes,
            live=job.live, key=own_key(name[1]), arch=arch, settings=settings(), table=table,
        )  # fmt: skip
    numbers = count(1)

    def done(text: str) -> None:
        tell(f"{next(numbers)} of {len(remaining)} programs: {text}")

    if seconds is None and not code and not torch.cuda.is_initialized() and not torch.cuda.device_count():
        lowered_jobs |= _forked(contents, saved, folder, cache_paths, done)
    else:
        torch.save(saved, weights)
        requests = {name: Request(content=content, what=_title(name)) for name, content in contents.items()}
        kind = Kind(module="cgcompile.offline.lower.worker", folder=folder, died="lowering-broken")
        for name, lowered in ask(kind, requests, seconds=seconds):
            if not code:
                remember(cache_paths[name], lowered)
            lowered_jobs[name] = lowered
            done(_summary(name, lowered))
    if len(lowered_jobs) < len(jobs):
        raise TimeoutError
    return {name: lowered_jobs[name] for name in jobs}


def _title(name: RegionKey) -> str:
    return f"lowering {name[0]} for int_key {name[1]}"


def _summary(name: RegionKey, lowered: Lowered) -> str:
    return f"lowered {name[0]} for int_key {name[1]}: {len(lowered.variants)} kernels"


def _forked(
    contents: Mapping[RegionKey, WorkerJob],
    saved: Sequence[Mapping[str, Any]],
    folder: Path,
    cache_paths: Mapping[RegionKey, Path],
    tell: Tell,
) -> dict[RegionKey, Lowered]:
    """Lowers jobs in forked processes, several per process if there are many.  `saved`: the result of `_saved`."""
    if not contents:
        return {}
    with quick_imports():  # imported here because cached results need no Inductor
        from .worker import lowered_program

    def lower(names: Sequence[RegionKey], tell: Tell) -> dict[RegionKey, Lowered]:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.fspath(folder / f"fork.{os.getpid()}.cache")
        lowered_jobs = {}
        for name in names:
            job = contents[name]
            try:
                lowered_jobs[name] = lowered_program(job, program_of(job, saved[job.number]))
            except BuildError:
                raise
            except Exception as error:
                text = f"{_title(name)}: {type(error).__name__}: {first_line(error)}"
                raise BuildError("lowering-broken", text) from error
            remember(cache_paths[name], lowered_jobs[name])
            tell(_summary(name, lowered_jobs[name]))
        return lowered_jobs

    names, limit = list(contents), 2 * processors()
    tasks = {number: partial(lower, names[number::limit]) for number in range(min(limit, len(names)))}
    outcomes = run_forked(tasks, dict.fromkeys(tasks, tell), folder, "lowering-broken")
    return {name: lowered for results in outcomes.values() for name, lowered in results.items()}


def _saved(jobs: Iterable[LoweringJob], folder: Path) -> tuple[dict[int, tuple[int, Path]], list[dict[str, Any]]]:
    """Saves the jobs' programs without weights.  Returns their (number, file) by `id`, and the weights by number.  A weight is a
    tensor.  If it may change between calls, such as a cache, it is (number of the storage, its bytes, offset, strides)."""
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
    return files, saved
