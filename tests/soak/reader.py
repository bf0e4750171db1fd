"""`python -m tests.soak.reader PATH`: loads and calls the bundle at PATH repeatedly until standard input ends.

The first line of standard input has the answers of each bundle by name, as JSON. At the end it prints the counts as JSON.
"""

from __future__ import annotations

import json
import select
import sys
from collections import Counter
from typing import Any

import numpy as np

import cgbundle

INPUT = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)
"""The input of every call."""

CALLS = 3
"""Calls of each loaded program while it is the newest."""


def answer(program: Any) -> str:
    """Returns the output of a program for INPUT: its shape and bits."""
    output = program(INPUT)
    return f"{output.shape} {output.tobytes().hex()}"


def read(path: str, expected: dict[str, str]) -> dict[str, Any]:
    """Returns the counts: `failed` loads and calls, and `mixed`, answers of another bundle. `seen` counts loads by the bundle's
    name, `failures` their reasons."""
    counts, seen, failures = Counter(loads=0, calls=0, failed=0, mixed=0), Counter[str](), Counter[str]()
    before: Any = None
    while not select.select([sys.stdin], [], [], 0)[0]:
        counts["loads"] += 1
        try:
            program = cgbundle.load(path)
        except (cgbundle.CgbundleError, OSError) as error:
            counts["failed"] += 1
            failures[f"{type(error).__name__}: {error}"] += 1
            continue
        seen[program.manifest.name] += 1
        for loaded in [program] * CALLS + [before] * (before is not None):  # the previous program must still give its own answer
            counts["calls"] += 1
            try:
                counts["mixed"] += answer(loaded) != expected[loaded.manifest.name]
            except cgbundle.CgbundleError as error:
                counts["failed"] += 1
                failures[f"a call: {type(error).__name__}: {error}"] += 1
        if before is not None:
            before.close()
        before = program
    return {"counts": counts, "seen": seen, "failures": failures}


def main() -> None:
    """Reads the expected answers, prints `ready` after a first load, starts at the next line, and prints the counts at the end."""
    expected = json.loads(sys.stdin.readline())
    with cgbundle.load(sys.argv[1]) as program:
        answer(program)
    print("ready", flush=True)
    sys.stdin.readline()  # all readers are ready
    print(json.dumps(read(sys.argv[1], expected)), flush=True)


if __name__ == "__main__":
    main()
