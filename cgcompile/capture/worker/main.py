"""A recorder process, which a fork server starts (util/fork_server.py): its role is the argument.  The path of a pickled `Request`
is a line of its requests, by which it loads the program; a second line lets it begin.  Progress and DONE are lines of its answers.
CUPTI must subscribe before CUDA starts: the server has imported torch, and leaves CUDA alone."""

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
    """Answers requests: writes (result, None), or (None, a refusal as (code, message, hint)), to the request's file.  A result is a
    Take, or nothing for the role that fills the compile cache.  `argument`: the role, and how many processes Inductor may start."""
    role, processes = argument.split()
    log = ImageLog() if role == RECORD else None

    def tell(text: str) -> None:
        print(f"+ {text}", file=answers, flush=True)

    wake(int(processes))
    if log is None:  # what records gives the GPU's memory back as soon as it can
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
