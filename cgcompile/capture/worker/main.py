"""A recorder process: `python -m cgcompile.capture.worker.main ROLE PARENT`, its role and the process that started it.  The path of
a pickled `Request` comes on standard input, progress and DONE go to standard output.  CUPTI must subscribe before CUDA starts,
therefore before torch is imported."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from ...errors import BuildError
from ...util.garbage_collection import collect_seldom
from ...util.workers import end_with_parent
from ..request import DONE, RECORD, Request
from .cupti import ImageLog


def main(role: str) -> None:
    """Answers requests: writes (result, None), or (None, a refusal as (code, message, hint)), to the request's file.  A result is a
    Take, or nothing for the role that fills the compile cache."""
    log = ImageLog() if role == RECORD else None
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what torch, Triton and the user's code print goes to the log
    from .record import fill_compile_cache, record, wake  # here: imports torch, after the subscription

    def tell(text: str) -> None:
        print(f"+ {text}", file=answers, flush=True)

    wake()
    if log is None:  # what records gives the GPU's memory back as soon as it can
        collect_seldom()
    for line in requests:
        tell("loading the program")
        request: Request = pickle.loads(Path(line.rstrip("\n")).read_bytes())
        found, refusal = None, None
        try:
            if log is None:
                fill_compile_cache(request, tell)
            else:
                found = record(request, log, tell)
        except BuildError as error:
            refusal = error.code, str(error), error.hint
        request.result.write_bytes(pickle.dumps((found, refusal)))
        print(DONE, file=answers, flush=True)
    if log is not None:
        log.close()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries unload their kernels in destructors, when no Python callback may run any more
