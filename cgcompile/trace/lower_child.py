"""A process that lowers regions at int_keys: `python -m cgcompile.trace.lower_child PLACE` (see `children`)."""

from __future__ import annotations

import sys
import warnings

from cgcompile.arch import arch
from cgcompile.trace.children import answer
from cgcompile.trace.lowering_jobs import Request
from cgcompile.trace.traced import Traced


def lower(request: Request) -> list[Traced]:
    """What is asked for."""
    import torch

    from cgcompile.record.tensors import apply_settings
    from cgcompile.trace.lowering import lower_key
    from cgcompile.trace.tuned import choose_with, pieces_with

    warnings.filterwarnings("ignore", module=r"torch\.|copyreg")
    apply_settings(request.settings)
    target, table = arch(request.arch), request.table
    choose, pieces = choose_with(table), pieces_with(table, target)
    made = []
    for item in request.items:
        program, tensors = torch.export.load(item.program), torch.load(item.tensors)
        made.append(lower_key(program, item.key, tensors, target, layouts=item.layouts, choose=choose, pieces=pieces))
    return made


if __name__ == "__main__":
    sys.exit(answer(sys.argv[1], lower))
