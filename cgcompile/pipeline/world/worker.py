"""A worker process that builds one rank (see `util.workers`).  It gets a `RankJob` and returns the seconds of its stages."""

from __future__ import annotations

import json
import warnings
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from ...targets.choice import Options
from ...util.progress import Event, Watcher, silent
from ...util.workers import serve


@dataclass(frozen=True, kw_only=True, slots=True)
class RankJob:
    """Builds rank `rank` of `size` of the model named `model` into `folder`.  The ranks synchronize through the file `meeting`.
    Rank 0 writes each `progress.Event` as a line of JSON to the pipe `progress_file`."""

    model: str
    options: Options
    rank: int
    size: int
    meeting: Path
    folder: Path
    progress_file: Path


def work(job: RankJob) -> tuple[tuple[str, float], ...]:
    """Builds the rank at the same time as the other ranks."""
    warnings.filterwarnings("ignore", module=r"torch\.|copyreg")
    from ...bundle.ranks import joined  # late: they import torch
    from ..build import build

    job.folder.mkdir(parents=True)
    with joined(job.rank, job.size, job.meeting) as ranks, ExitStack() as stack:
        watcher = silent if job.rank else _teller(stack.enter_context(open(job.progress_file, "w")))
        return build(job.model, None, replace(job.options, progress=watcher), ranks=ranks, out_path=job.folder).seconds


def _teller(pipe: TextIO) -> Watcher:
    def tell(event: Event) -> None:
        print(json.dumps(asdict(event)), file=pipe, flush=True)

    return tell


if __name__ == "__main__":
    serve(work)
