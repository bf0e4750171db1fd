"""Writes the table of a target from measurements: `table.py ARCH MEASURED.json...`. Third of the three parts of `make tune`.

Keeps the fastest candidates of every problem. The file records the GPU, driver, versions and date of the measurement.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from tests.bench.common import children

KEPT = 4
"""Candidates per problem: more than one, because another version of Inductor may not offer the fastest candidate."""


def main(arch: str, *measured: str) -> None:
    """Writes cgcompile/offline/tuning/ARCH.json. Rows of later files replace rows of earlier ones for the same problem."""
    files = [json.loads(Path(path).read_text()) for path in measured]
    latest, gpus = files[-1], dict.fromkeys([name for file in files for name in file["gpu"].split(", ")])
    problems = {json.dumps(row["problem"]): row["measured"][:KEPT] for file in files for row in file["problems"]}
    lines = [f'{{"problem": {problem}, "measured": {json.dumps(rows)}}}' for problem, rows in problems.items()]
    about = {
        "arch": arch, "gpu": ", ".join(gpus), "driver": latest["driver"], "date": latest["date"],
        "versions": {"torch": version("torch"), "triton": version("triton")},
        "how": "tests/bench/tuning/measure.py: median of 7 graphs of 24 launches each, operands from memory, microseconds",
    }  # fmt: skip
    path = children.ROOT / "cgcompile" / "offline" / "tuning" / f"{arch}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(about)[:-1] + ',\n"problems": [\n' + ",\n".join(sorted(lines)) + "\n]}\n")
    print(f"{path}: {len(lines)} problems, {path.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main(*sys.argv[1:])
