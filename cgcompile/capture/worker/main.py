"""The main function of a recorder process, which a fork server starts (util/fork_server.py).  It reads the path of a pickled
`Request` as a line from `requests` and loads the program.  A second line starts the work.  It writes progress and DONE as lines to
`answers`.  CUPTI must subscribe before CUDA starts; the fork server has imported torch without initializing CUDA."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import IO

from ...errors import BuildError
from ...targets.cuda.lowering import import_compiler
from ...util.garbage_collection import collect_seldom
from ..request import DONE, RECORD, Request
from .cupti import ImageLog
from .record import fill_compile_cache, load_program, record, wake

import_compiler()


def main(argument: str, requests: IO[str], answers: IO[str]) -> None:
    """Handles requests: writes (result, None), or (None, (code, message, hint)) for an error, to the request's file.  The result
    is a Take for role RECORD, else None.  `argument`: the role, and how many compile processes Inductor may start."""
    role, processes = argument.split()
    log = ImageLog() if role == RECORD else None

    def tell(text: str) -> None:
        print(f"+ {text}", file=answers, flush=True)

    wake(int(processes))
    if log is None:  # recorders collect garbage as usual, which frees GPU memory early
        collect_seldom()
    for line in requests:
        tell("loading the program")
        request: Request = pickle.loads(Path(line.rstrip("\n")).read_bytes())
        result, refusal = None, None
        try:
            loaded = load_program(request)
            if not requests.readline():
                return
            if log is None:
                fill_compile_cache(request, loaded, tell)
            else:
                result = record(request, loaded, log, tell)
        except BuildError as error:
            refusal = error.code, str(error), error.hint
        request.result.write_bytes(pickle.dumps((result, refusal)))
        print(DONE, file=answers, flush=True)
    if log is not None:
        log.close()
