"""`python -m tests.parity` prints the parity table.  `python -m tests.parity record` writes verdicts.json."""

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
