"""A worker for tests of the fork server: it echoes lines, or fails as its argument says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import IO

IMPORTED_BY = os.getpid()


def main(argument: str, requests: IO[str], answers: IO[str]) -> None:
    print(f"log of {argument}")
    if argument.startswith("variable "):
        print(os.environ.get(argument.split()[1], "none"), file=answers, flush=True)
    if argument == "raise":
        raise ValueError("bad input")
    if argument == "children":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, file=answers, flush=True)
    if argument == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    for line in requests:
        print(line.strip(), IMPORTED_BY, os.getpid(), os.getpgid(0), file=answers, flush=True)
