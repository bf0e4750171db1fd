"""Lower every region at every int_key in processes that see no GPU, some at a time.  The parent's side; imports no Inductor."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from cgbundle.format.schema import IntKey

from ...export.weights import weight_tensors
from ...targets.cuda.tensors import settings
from ...targets.weights import contents
from ...util.content_cache import digest, recall, remember, sources, versions
from ...util.workers import ask
from ..traced import Traced

Name = tuple[str, IntKey]
"""A region and an int_key."""

Layouts = tuple[tuple[int, ...] | None, ...]
"""Of each output the strides that it must have, in elements; None for one that may lie anyhow.  () for none of them must."""


SHARE = 4
"""Jobs that one process does: to start one and import Inductor takes some 3 s, a small region 1 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweringJob:
    """A program to lower at the sizes of `tensors`, which are like those that it takes, on the CPU."""

    program: ExportedProgram = field(repr=False)
    tensors: tuple[torch.Tensor, ...] = field(repr=False)
    layouts: Layouts


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A job as a process is asked for it: files of the exported program and of the tensors that it takes."""

    program: Path
    tensors: Path
    layouts: Layouts
    key: IntKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A process's jobs; the answer is what each was lowered to, in their order.

    `settings`: torch's switches that choose kernels; `table`: the folder of measured configurations, or None for Inductor's offers
    ranked by the model of cost.
    """

    items: tuple[Item, ...]
    arch: str
    settings: Mapping[str, Any]
    table: Path | None


def lower_all(
    jobs: Mapping[Name, LoweringJob],
    arch: str,
    folder: Path,
    *,
    cache: Path,
    table: Path | None = None,
    workers: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[Name, Traced]:
    """Every job lowered for `arch`, in the order of `jobs`.

    `folder` takes working files and logs; `cache` keeps what was lowered, by content.  `workers`: processes at a time, by default
    one for each processor.  Raises what `lowering.lower_key` raises, and lowering-broken when a process ends without an answer.
    """
    rest = arch, table.read_bytes() if table else b"", settings(), versions(), sources()
    about = _contents([job.program for job in jobs.values()])
    kept = {
        name: cache / "lowered" / digest(about[id(job.program)], rest, name[1], _metas(job.tensors), job.layouts)
        for name, job in jobs.items()
    }
    known: dict[Name, Traced] = {name: found for name, path in kept.items() if (found := recall(path)) is not None}
    if len(known) == len(jobs):
        tell(f"all {len(known)} were lowered before")
    left = [name for name in jobs if name not in known]
    files = _saved([jobs[name].program for name in left], folder)
    at_once = workers or os.cpu_count() or 1

    def several(number: int, names: Sequence[Name]) -> list[Traced]:
        items = [_item(jobs[name], name, files, folder / f"tensors{number}-{place}") for place, name in enumerate(names)]
        request = Request(items=tuple(items), arch=arch, settings=settings(), table=table)
        what = f"lowering {', '.join([f'{region} for int_key {key}' for region, key in names])}"
        found: list[Traced] = ask("cgcompile.offline.lower.worker", request, folder / f"lower{number}", {}, "lowering-broken", what)
        for name, traced in zip(names, found, strict=True):
            remember(kept[name], traced)
            tell(f"lowered {name[0]} for int_key {name[1]}: {len(traced.variants)} kernels")
        return found

    with ThreadPoolExecutor(at_once) as pool:
        futures = [(names, pool.submit(several, number, names)) for number, names in enumerate(_shared(left, at_once))]
        try:
            for names, future in futures:
                known.update(zip(names, future.result(), strict=True))
        finally:
            pool.shutdown(cancel_futures=True)
    return {name: known[name] for name in jobs}


def _shared(names: Sequence[Name], workers: int) -> list[Sequence[Name]]:
    """The jobs of each process: as many processes as can run at a time, and more where each had more than SHARE."""
    count = min(len(names), max(workers, -(-len(names) // SHARE)))
    return [names[start::count] for start in range(count)]


def _item(job: LoweringJob, name: Name, files: Mapping[int, Path], tensors: Path) -> Item:
    torch.save(job.tensors, tensors)
    return Item(program=files[id(job.program)], tensors=tensors, layouts=job.layouts, key=name[1])


def _saved(programs: Iterable[ExportedProgram], folder: Path) -> dict[int, Path]:
    """Files of the programs by identity, each once."""
    files: dict[int, Path] = {}
    for program in programs:
        if id(program) not in files:
            files[id(program)] = folder / f"program{len(files)}.pt2"
            torch.export.save(program, files[id(program)])
    return files


def _contents(programs: Iterable[ExportedProgram]) -> dict[int, str]:
    """Of each program, by identity, the hash of all that lowering depends on: its code, signature, and tensors.  The ranges that
    the sizes were declared with do not matter to any one of them.  A weight of several regions is read once."""
    hashes: dict[object, bytes] = {}
    found: dict[int, str] = {}
    for program in programs:
        if id(program) not in found:
            found[id(program)] = digest(*_described(program, hashes))
    return found


def _described(program: ExportedProgram, hashes: dict[object, bytes]) -> Iterator[object]:
    for name, module in program.graph_module.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            yield name, module.code
    yield str(program.graph_signature), str(program.call_spec)
    for name, value in weight_tensors(program).items():
        same = value.data_ptr(), *_meta(value)
        if same not in hashes:
            hashes[same] = hashlib.sha256(contents(value, value.stride())).digest()
        yield name, _meta(value), hashes[same]


def _metas(tensors: Iterable[torch.Tensor]) -> list[tuple[object, ...]]:
    return [_meta(tensor) for tensor in tensors]


def _meta(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()
