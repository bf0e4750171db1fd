"""A worker process that lowers regions at int_keys, one request after another (see `util.workers`)."""

from __future__ import annotations

import warnings
from functools import partial

from torch.export import ExportedProgram

from ...model.load import load_code
from ...targets.architectures import arch
from ...targets.cuda.tensors import apply_settings
from ...util.garbage_collection import collect_seldom
from ...util.workers import serve
from ..lowered import Lowered
from ..tuning.cost_model import choose, measured
from ..tuning.measurements import read_table
from ..tuning.split_factors import split_factor
from .inductor import lower_key
from .worker_job import WorkerJob, read_program


def work(job: WorkerJob) -> Lowered:
    warnings.filterwarnings("ignore", module=r"torch\.|copyreg")
    apply_settings(job.settings)
    load_code(job.code)
    return lowered_program(job, read_program(job))


def lowered_program(job: WorkerJob, program: ExportedProgram) -> Lowered:
    """Lowers the job's program, in a process that already has its settings and operators."""
    target, table = arch(job.arch), read_table(job.table) if job.table else {}
    return lower_key(
        program,
        job.key,
        job.tensors,
        target,
        layouts=job.layouts,
        writes=job.writes,
        live=job.live,
        choose=partial(choose, table=table),
        more=partial(measured, table=table),
        split_factor=partial(split_factor, arch=target, table=table),
    )


if __name__ == "__main__":
    collect_seldom()
    serve(work)
