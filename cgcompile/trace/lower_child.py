"""A process that lowers one int_key: `python -m cgcompile.trace.lower_child REQUEST`, where REQUEST is the path of a pickled
`lowering_jobs.Request`.  A process of its own, because torch has to believe in a GPU from the start."""

from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path

from cgcompile.arch import arch
from cgcompile.errors import BuildError
from cgcompile.trace.lowering_jobs import REFUSED, Request


def main(path: str) -> int:
    """Writes the Traced, or a refusal as (class name, message, hint)."""
    request: Request = pickle.loads(Path(path).read_bytes())
    try:
        result = _lower(request)
    except BuildError as error:
        request.result.write_bytes(pickle.dumps((type(error).__name__, str(error), error.hint)))
        return REFUSED
    request.result.write_bytes(pickle.dumps(result))
    return 0


def _lower(request: Request) -> object:
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
    sys.exit(main(sys.argv[1]))
