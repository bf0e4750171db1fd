"""A process that lowers one int_key: `python -m cgcompile.trace.lower_child PLACE` (see `children`)."""

from __future__ import annotations

import sys
import warnings

from cgcompile.arch import arch
from cgcompile.trace.children import answer
from cgcompile.trace.lowering_jobs import Request
from cgcompile.trace.traced import Traced


def lower(request: Request) -> Traced:
    """What is asked for."""
    import torch

    from cgcompile.record.tensors import apply_settings
    from cgcompile.trace.lowering import lower_key
    from cgcompile.trace.tuned import choose_with, pieces_with

    warnings.filterwarnings("ignore", module=r"torch\.|copyreg")
    apply_settings(request.settings)
    program = torch.export.load(request.program)
    tensors = torch.load(request.tensors)[request.key]
    target, table = arch(request.arch), request.table
    return lower_key(program, request.key, tensors, target, choose=choose_with(table), pieces=pieces_with(table, target))


if __name__ == "__main__":
    sys.exit(answer(sys.argv[1], lower))
