"""`python -m tests.parity`: the parity table, on stdout.  `python -m tests.parity record`: verdicts.json anew."""

from __future__ import annotations

import sys

from .compare import compare, table
from .corpus import CASES
from .differences import DIFFERENCES
from .recorded import write

if __name__ == "__main__":
    if sys.argv[1:] == ["record"]:
        write(CASES)
    else:
        print(table([compare(case) for case in CASES], DIFFERENCES))
