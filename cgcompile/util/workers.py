"""A process of its own for one piece of work, because torch or Triton has to be told something before it is imported.

Request and answer are pickles between two processes of one build, in its working folder; they never become part of a bundle.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import BuildError, named

REFUSED = 3
"""Exit status of a process whose answer is a refusal: (code, message, hint)."""


def ask(module: str, request: object, place: Path, environment: Mapping[str, str], died: str, what: str) -> Any:
    """The answer of `python -m MODULE` to a request; `place` with the suffixes .request, .answer and .log are its files.

    Raises what the process refused, and an error of code `died`, naming `what` was asked for, when it ended without an answer.
    """
    path, log = place.with_name(f"{place.name}.request"), place.with_name(f"{place.name}.log")
    path.write_bytes(pickle.dumps(request))
    with open(log, "w") as out:
        status = subprocess.run(
            [sys.executable, "-m", module, os.fspath(place)],
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "TORCHINDUCTOR_CACHE_DIR": os.fspath(place.with_name(f"{place.name}.cache")),
                "PYTHONFAULTHANDLER": "1",
                "PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path),
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        ).returncode
    if status not in (0, REFUSED):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else "it wrote nothing"
        raise BuildError(died, f"{what}: the process ended with status {status}: {last}")
    found = pickle.loads(place.with_name(f"{place.name}.answer").read_bytes())
    if status == REFUSED:
        raise named(*found)
    return found


def answer(place: str, work: Callable[[Any], object]) -> int:
    """In the process: does the work that is asked for at `place`, and returns the exit status."""
    request = pickle.loads(Path(f"{place}.request").read_bytes())
    try:
        found, status = work(request), 0
    except BuildError as error:
        found, status = (error.code, str(error), error.hint), REFUSED
    Path(f"{place}.answer").write_bytes(pickle.dumps(found))
    return status
