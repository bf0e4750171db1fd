"""Records many cases and prints a text about each: `python -m tests.gpu.helpers.survey OUT name:level ...` (needs a GPU).

The text shows nodes by kind, the census of parameter words (tests/helpers/census.py), tables, module state, arena, and the error
against eager PyTorch. It also shows whether a new process without torch replayed the case bit for bit. Cases run in child
processes, `JOBS` at a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def survey(name: str, level: str, folder: Path) -> str:
    """Records one case and returns its text."""
    from cgcompile.errors import BuildError
    from tests.gpu.helpers.recording import record_case, replay

    marks: list[tuple[float, str]] = []
    start = time.perf_counter()
    try:
        recorded, plain = record_case(name, folder, level, tell=lambda text: marks.append((time.perf_counter() - start, text)))
    except BuildError as error:
        return f"REFUSED {type(error).__name__}: {error} ({marks[-1:]})"
    seconds = time.perf_counter() - start
    lines = []
    for key, (graph,) in recorded.graphs.items():
        recording = graph.recording
        kinds = dict(Counter(type(node).__name__ for node in recording.nodes))
        census, replayed = plain["census"][key], recorded.replays[key]
        attributes = Counter((n, v) for node in recording.nodes for n, v in getattr(node, "attributes", ()))
        functions = Counter(a for f in recording.functions for a in f.attributes)
        edges = {(e.from_port, e.to_port, e.type) for e in recording.edges}
        chain = all(e.target == e.source + 1 for e in recording.edges)
        lines.append(
            f"  {key} {kinds} {'chain' if chain else 'BRANCHES'} edges {sorted(edges)} "
            f"words {census.words} reloc {census.relocations} const {census.constants} undef {census.undefined} "
            f"one-sided {census.one_sided} shifted {census.shifted} arena {graph.arena / 2**20:.1f}M "
            f"errors {[f'{difference.error:.1e}' for difference in replayed.differences]} det {replayed.deterministic} "
            f"attributes {dict(attributes)} {dict(functions)}"
        )
    images = sum(map(len, recorded.images.values()))
    head = (
        f"{seconds:.1f} s, images {len(recorded.images)} ({images / 1e6:.2f} MB), weights {recorded.weights_bytes / 1e6:.1f} MB, "
        f"tables {[len(t.contents) for t in recorded.tables]}, state {[(s.symbol, len(s.relocations)) for s in recorded.states]}, "
        f"state {recorded.state_bytes} bytes"
    )
    timeline = "  " + " | ".join(
        f"{at:.1f} {text}" for at, text in marks if "record0" in text or "prime0" in text or "comparing" in text
    )
    return "\n".join([f"REPLAY {replay(folder)}; {head}", *lines, timeline])


def main(arguments: list[str]) -> None:
    """Runs one case in this process, or several in child processes."""
    out = Path(arguments[0])
    if len(arguments) == 2:
        name, level = arguments[1].split(":")
        print(survey(name, level, out / f"{name}-{level}"))
        return

    def run_case(case: str) -> None:
        command = [sys.executable, "-m", "tests.gpu.helpers.survey", str(out), case]
        done = subprocess.run(command, capture_output=True, text=True)
        text = done.stdout.strip() or f"FAILED: {done.stderr.strip()[-1500:]}"
        print(f"{case}: {text}", flush=True)

    with ThreadPoolExecutor(int(os.environ.get("JOBS", "6"))) as pool:
        list(pool.map(run_case, arguments[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
