"""A process that lowers regions at int_keys: `python -m cgcompile.offline.lower.worker PLACE` (see `children`)."""

from __future__ import annotations

import sys
import warnings

from ...targets.architectures import arch
from ...util.workers import answer
from ..lowered import Lowered
from .jobs import Request


def lower(request: Request) -> list[Lowered]:
    """What is asked for."""
    import torch

    from ...targets.cuda.tensors import apply_settings
    from ..tuning.measurements import choose_with, split_factor_with
    from .inductor import lower_key

    warnings.filterwarnings("ignore", module=r"torch\.|copyreg")
    apply_settings(request.settings)
    target, table = arch(request.arch), request.table
    choose, pieces = choose_with(table), split_factor_with(table, target)
    made = []
    for item in request.items:
        program, tensors = torch.export.load(item.program), torch.load(item.tensors)
        made.append(lower_key(program, item.key, tensors, target, layouts=item.layouts, choose=choose, pieces=pieces))
    return made


if __name__ == "__main__":
    sys.exit(answer(sys.argv[1], lower))
