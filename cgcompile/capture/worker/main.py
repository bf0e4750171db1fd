"""A recorder process: `python -m cgcompile.capture.worker.main REQUEST PARENT`, a pickled `Request`'s path and a process.  CUPTI
must subscribe before CUDA starts, therefore before torch is imported; the parent stays free of both."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from ...errors import BuildError
from ...util.workers import end_with_parent
from ..request import PREFIX, REFUSED, Request
from .cupti import ImageLog


def tell(text: str) -> None:
    """A line of progress for the parent."""
    print(PREFIX + text, flush=True)


def main(path: str) -> int:
    """Do what the request says and write its result: a Take, nothing for role "prime", or a refusal as (code, message, hint)."""
    request: Request = pickle.loads(Path(path).read_bytes())
    try:
        result = _run(request)
    except BuildError as error:
        request.result.write_bytes(pickle.dumps((error.code, str(error), error.hint)))
        return REFUSED
    request.result.write_bytes(pickle.dumps(result))
    return 0


def _run(request: Request) -> object:
    if request.role == "prime":
        from .record import fill_compile_cache  # here: imports torch

        fill_compile_cache(request, tell)
        return None
    log = ImageLog()
    from .record import record  # here: imports torch, after the subscription

    try:
        return record(request, log, tell)
    finally:
        log.close()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # libraries unload their kernels in destructors, when no Python callback may run any more
