"""A process that builds one rank (see `util.workers`), asked for a `RankJob`; it gives the seconds of its stages."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from ...util.progress import silent
from ...util.workers import serve
from ..records import Options


@dataclass(frozen=True, kw_only=True, slots=True)
class RankJob:
    """Rank number `rank` of `size` of the model named `model`, into `folder`.  The ranks meet at the file `meeting`."""

    model: str
    options: Options
    rank: int
    size: int
    meeting: Path
    folder: Path


def work(job: RankJob) -> tuple[tuple[str, float], ...]:
    """Builds the rank beside the other ones."""
    warnings.filterwarnings("ignore", module=r"torch\.|copyreg")
    from ...bundle.ranks import joined  # late: they import torch
    from ..build import build_rank

    job.folder.mkdir(parents=True)
    with joined(job.rank, job.size, job.meeting) as ranks:
        return build_rank(job.model, replace(job.options, progress=silent), ranks, job.folder).seconds


if __name__ == "__main__":
    serve(work)
