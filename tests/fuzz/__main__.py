"""Runs the fuzzer: watches its processes and prints a table of the results.

    python -m tests.fuzz --minutes 20 --jobs 2             every golden bundle
    python -m tests.fuzz --cases 20000 --golden v1/mlp     this number of cases of each
    python -m tests.fuzz --minutes 60 --first 1000000      different cases than on a machine that begins at 0
    python -m tests.fuzz --replay v1/cpu_mlp 1234          one case again, with its traceback

Exit status 1 if a process crashed, an exception was not a CgbundleError, an answer was wrong, or a case took over 5 s or 500 MiB.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import worker
from tests.fuzz.answers import Answers
from tests.helpers.places import GOLDEN, ROOT

HANG = 5.0
"""CPU seconds that a case may take."""

START = 60.0
"""Seconds within which a process must reach its next case, even if many others run."""

BATCH = 2000
"""Cases of one process."""

FINDS = ("wrong", "foreign", "memory", "crashed", "hung")
"""Prefixes of outcomes that count as finds."""


@dataclass(kw_only=True, slots=True)
class Tally:
    """Number of cases by kind and by outcome, and a line for every find (FINDS)."""

    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    finds: list[str] = field(default_factory=list)

    def add(self, golden: str, number: int, kind: str, outcome: str) -> None:
        self.kinds[kind] += 1
        self.outcomes[outcome.partition(": ")[0]] += 1
        if outcome.partition(": ")[0] in FINDS:
            self.finds.append(f"{kind}: {outcome}\n    python -m tests.fuzz --replay {golden} {number}")

    def update(self, other: Tally) -> None:
        self.kinds.update(other.kinds)
        self.outcomes.update(other.outcomes)
        self.finds += other.finds


def batch(golden: Path, first: int, last: int, until: float = 0.0) -> Tally:
    """Runs cases in a child process, until the time `until` (0: no limit). If a case kills the process, continues with the next."""
    tally = Tally()
    name = f"{golden.parent.name}/{golden.stem}"
    while first < last and not (until and time.time() > until):
        with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
            log, err = Path(scratch) / "log", Path(scratch) / "err"
            log.touch()
            command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.worker", str(golden), scratch]
            with open(err, "wb") as errors:
                process = subprocess.Popen([*command, str(first), str(last), str(until)], stdout=errors, stderr=errors, cwd=ROOT)
                hung = _watch(process, log)
            done, _, open_case = log.read_bytes().decode(errors="replace").rpartition("\n")
            for line in done.splitlines():
                number, kind, outcome = line.split(" ", 2)
                tally.add(name, int(number), kind, outcome)
            if process.returncode == 0:
                return tally
            last_words = err.read_text(errors="replace").strip()[-500:]
            if not open_case and not done:
                raise RuntimeError(
                    f"{name}: the process ended before its first case, with status {process.returncode}: {last_words}"
                )
            if not open_case:  # the last case had ended, but its side effects killed the process
                open_case = done.splitlines()[-1].rpartition(" ")[0]
            number, kind, *_ = [*open_case.split(" "), "", ""]
            outcome = f"hung: over {HANG} s" if hung else f"crashed: status {process.returncode}: {_where(err)}"
            tally.add(name, int(number), kind or "none", outcome)
            first = int(number) + 1
    return tally


def _watch(process: subprocess.Popen[bytes], log: Path) -> bool:
    """Waits for the end of a process. Kills it if its log does not grow within HANG seconds of CPU time (many processes may share a
    core), or within START seconds of wall time (it may wait forever). Returns whether it was killed."""
    size, since, spent = 0, time.monotonic(), 0.0
    while process.poll() is None:
        time.sleep(0.05)
        now = log.stat().st_size
        if now != size:
            size, since, spent = now, time.monotonic(), _seconds(process.pid)
        elif time.monotonic() - since > START or (size and _seconds(process.pid) - spent > HANG):
            process.kill()
            process.wait()
            return True
    return False


def _seconds(pid: int) -> float:
    """Returns the CPU seconds that a process has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _where(err: Path) -> str:
    """Returns the innermost lines of the project's code in the output of faulthandler."""
    lines = [line.strip() for line in err.read_text(errors="replace").splitlines() if line.strip()]
    project_lines = [line for line in lines if "bundles/cgbundle" in line or "tests/fuzz" in line]
    return "; ".join([line.rpartition("/")[2] for line in project_lines[:3]]) or "; ".join(lines[-2:])[:300]


def run(goldens: list[Path], first: int, last: int, jobs: int, until: float = 0.0) -> Tally:
    """Runs cases FIRST..LAST of every golden bundle, with `jobs` processes at a time."""
    tally, lock = Tally(), threading.Lock()
    begins = itertools.takewhile(lambda begin: begin < last, itertools.count(first, BATCH))
    todo = ((golden, begin, min(begin + BATCH, last)) for begin in begins for golden in goldens)

    def work() -> None:
        while not (until and time.time() > until):
            with lock:
                job = next(todo, None)
            if job is None:
                return
            batch_tally = batch(*job, until)
            with lock:
                tally.update(batch_tally)
                for find in batch_tally.finds:
                    print(find, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(work) for _ in range(jobs)]:
            future.result()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--cases", type=int, default=0, help="of every golden")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--golden", action="append", default=[])
    parser.add_argument("--replay", nargs=2, metavar=("GOLDEN", "CASE"))
    options = parser.parse_args()
    if options.replay:
        return replay(*options.replay)
    goldens = [GOLDEN / f"{name}.cgb" for name in options.golden] or sorted(GOLDEN.glob("v*/*.cgb"))
    until = time.time() + options.minutes * 60 if options.minutes else 0.0
    last = options.first + (options.cases or (1 << 40 if until else BATCH))
    begun = time.monotonic()
    tally = run(goldens, options.first, last, options.jobs, until)
    cases, seconds = sum(tally.outcomes.values()), time.monotonic() - begun
    print(f"{cases:,} cases of {len(goldens)} bundles in {seconds:.0f} s ({cases / seconds:.0f}/s), {len(tally.finds)} finds")
    for title, counts in (("kind", tally.kinds), ("outcome", tally.outcomes)):
        print(title)
        for name, count in counts.most_common():
            print(f"{count:>10,}  {name}")
    return 1 if tally.finds else 0


def replay(name: str, number: str) -> int:
    """Runs one case again in this process, without catching its error."""
    golden = worker.Golden(GOLDEN / f"{name}.cgb", Path(tempfile.mkdtemp(prefix="fuzz-")))
    kind = worker.mutate(golden, int(number))
    print(kind, "in", golden.folder)
    print(worker.run(golden, Answers.of(str(golden.origin)), kind, int(number)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
