"""A worker for tests of recorder processes: it ends in the middle of its work."""

from __future__ import annotations

import os
import sys
from typing import IO


def main(argument: str, requests: IO[str], answers: IO[str]) -> None:
    print("+ lowering", file=answers, flush=True)
    requests.readline()
    sys.stderr.write("one\n\nNo more memory\n")
    sys.stderr.flush()
    os._exit(9)
