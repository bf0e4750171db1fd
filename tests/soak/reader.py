"""`python -m tests.soak.reader PATH`: loads and calls the bundle at PATH again and again until standard input ends.

The first line of standard input says what each bundle answers, by name, as JSON.  The answer to the end is a JSON of counts.
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
"""What every model is called with."""

CALLS = 3
"""Of each loaded program, while it is the newest."""


def answer(program: Any) -> str:
    """What a program says to INPUT: its shape and bits."""
    output = program(INPUT)
    return f"{output.shape} {output.tobytes().hex()}"


def read(path: str, expected: dict[str, str]) -> dict[str, Any]:
    """What was counted: `failed` loads and calls, `mixed` answers.  `seen`: loads by the bundle's name; `failures`: reasons."""
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
        for loaded in [program] * CALLS + [before] * (before is not None):  # the one before still answers as itself
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
    """Reads what to expect, says `ready` after a first load, begins at the next line, and ends with the counts."""
    expected = json.loads(sys.stdin.readline())
    with cgbundle.load(sys.argv[1]) as program:
        answer(program)
    print("ready", flush=True)
    sys.stdin.readline()  # all are ready
    print(json.dumps(read(sys.argv[1], expected)), flush=True)


if __name__ == "__main__":
    main()
