"""Runs the fuzzer: processes that are watched, and a table of what was found.

    python -m tests.fuzz --minutes 20 --jobs 2             every golden bundle that there is
    python -m tests.fuzz --cases 20000 --golden v1/mlp     so many cases of each
    python -m tests.fuzz --replay v1/cpu_mlp 1234          one case again, with its traceback

Exit status 1 when a process crashed, an exception was none of ours, an answer was wrong, or a case took over 5 s or 500 MiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz import worker
from tests.fuzz.answers import Answers
from tests.helpers.places import GOLDEN

HANG = 5.0
"""Seconds that a case may take."""

BATCH = 2000
"""Cases of one process."""


def batch(golden: Path, first: int, last: int) -> tuple[Counter[str], list[str]]:
    """Runs cases in a process of their own, and goes on behind one that killed it."""
    counts: Counter[str] = Counter()
    finds: list[str] = []
    name = f"{golden.parent.name}/{golden.stem}"
    while first < last:
        with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
            status = Path(scratch) / "status"
            status.write_bytes(first.to_bytes(8, "little"))
            command = [sys.executable, "-m", "tests.fuzz.worker", str(golden), scratch, str(status), str(first), str(last)]
            with open(Path(scratch) / "out", "w+") as out, open(Path(scratch) / "err", "w+") as err:
                process = subprocess.Popen(command, stdout=out, stderr=err, text=True)
                seen, since = -1, time.monotonic()
                hung = False
                while process.poll() is None:
                    time.sleep(0.05)
                    now = int.from_bytes(status.read_bytes()[:8], "little")
                    if now != seen:
                        seen, since = now, time.monotonic()
                    elif time.monotonic() - since > HANG + (10 if now == first else 0):
                        hung = True
                        process.kill()
                        process.wait()
                out.seek(0)
                err.seek(0)
                for line in out.read().splitlines():
                    row = json.loads(line)
                    if "counts" in row:
                        counts.update(row["counts"])
                    else:
                        finds.append(f"{name} case {row['case']} ({row['kind']}): {row['what']}")
                if process.returncode == 0:
                    return counts, finds
                at = int.from_bytes(status.read_bytes()[:8], "little")
                how = f"took over {HANG} s" if hung else f"ended the process with status {process.returncode}"
                finds.append(f"{name} case {at}: {how} {err.read().strip()[-300:] if not hung else ''}".rstrip())
                counts["crashed"] += 1
                first = at + 1
    return counts, finds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--golden", action="append", default=[])
    parser.add_argument("--replay", nargs=2, metavar=("GOLDEN", "CASE"))
    options = parser.parse_args()
    if options.replay:
        return replay(*options.replay)
    goldens = [GOLDEN / f"{name}.cgb" for name in options.golden] or sorted(GOLDEN.glob("v*/*.cgb"))
    until = time.monotonic() + options.minutes * 60 if options.minutes else float("inf")
    last = options.first + options.cases if options.cases else (1 << 40 if options.minutes else options.first + BATCH)
    counts: Counter[str] = Counter()
    finds: list[str] = []

    def jobs():  # type: ignore[no-untyped-def]
        for begin in range(options.first, last, BATCH):
            for golden in goldens:
                if time.monotonic() > until:
                    return
                yield golden, begin, min(begin + BATCH, last)

    begun = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        todo = jobs()
        running = {pool.submit(batch, *job) for job in [next(todo, None) for _ in range(options.jobs)] if job}
        while running:
            done = next((each for each in running if each.done()), None)
            if done is None:
                time.sleep(0.05)
                continue
            running.remove(done)
            some, more = done.result()
            counts.update(some)
            finds += more
            for line in more:
                print(line, flush=True)
            job = next(todo, None)
            if job:
                running.add(pool.submit(batch, *job))
    cases = sum(counts.values())
    print(f"{cases:,} cases of {len(goldens)} bundles in {time.monotonic() - begun:.0f} s, {len(finds)} finds")
    for what, count in counts.most_common():
        print(f"{count:>10,}  {what}")
    return 1 if finds else 0


def replay(name: str, number: str) -> int:
    """One case again, in this process; its traceback is not caught."""
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-"))
    golden = worker.Golden(GOLDEN / f"{name}.cgb", scratch)
    print(worker.mutate(golden, int(number)), "in", golden.folder)
    print(worker.run(golden, Answers.of(str(golden.origin))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
