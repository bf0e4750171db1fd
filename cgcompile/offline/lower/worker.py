"""A process that lowers regions at int_keys, one request after another (see `util.workers`)."""

from __future__ import annotations

import warnings

import torch

from ...targets.architectures import arch
from ...targets.cuda.tensors import apply_settings
from ...util.workers import serve
from ..lowered import Lowered
from ..tuning.measurements import choose_with, split_factor_with
from .inductor import lower_key
from .jobs import WorkerJob


def work(job: WorkerJob) -> Lowered:
    """What the job's program was lowered to."""
    warnings.filterwarnings("ignore", module=r"torch\.|copyreg")
    apply_settings(job.settings)
    target = arch(job.arch)
    return lower_key(
        torch.export.load(job.program),
        job.key,
        torch.load(job.tensors),
        target,
        layouts=job.layouts,
        choose=choose_with(job.table),
        pieces=split_factor_with(job.table, target),
    )


if __name__ == "__main__":
    serve(work)
