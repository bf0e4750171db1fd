"""`python -m tests.parity`: the parity table, on stdout."""

from __future__ import annotations

from .compare import compare, table
from .corpus import CASES
from .differences import DIFFERENCES

if __name__ == "__main__":
    print(table([compare(case) for case in CASES], DIFFERENCES))
