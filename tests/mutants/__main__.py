"""`python -m tests.mutants --count 300 --seed 1 --jobs 1`: measures how many random mutations of the code the tests of tests/pure
detect.

Each mutation runs with the tests of its module and, if these pass, with all of tests/pure. The working tree is not changed. A
mutation in equivalent.txt has no visible effect, for the reason given there, and is counted separately. Exit status 1 if fewer than
97 % of the other mutations are killed (detected), or if the tests fail without a mutation.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .modules import ALL, MODULES
from .mutations import MODULE, Mutation, apply, edits
from .trials import FAILED, PASSED, ROOT, Trial, copy_tree, start

EQUIVALENT = Path(__file__).with_name("equivalent.txt")
LIMIT = 600.0
"""Seconds that the tests may take without a mutation."""

SLACK, FACTOR = 10.0, 4.0
"""A mutant may take FACTOR times as long as the tests without it, plus SLACK seconds."""

LEAST = 0.97


def draw(modules: dict[str, str], count: int, seed: int) -> list[Mutation]:
    """Draws `count` different mutations of the sources, by path; fewer if there are not enough."""
    all_edits = [edit for path in sorted(modules) for edit in edits(path, modules[path])]
    random.Random(seed).shuffle(all_edits)
    mutations: dict[tuple[str, str], Mutation] = {}
    for edit in all_edits:
        if len(mutations) == count:
            break
        mutation = apply(edit, modules[edit.path])
        if mutation is not None:
            mutations.setdefault((mutation.path, mutation.source), mutation)
    return list(mutations.values())


def equivalents(text: str) -> dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], str]:
    """Returns the names of equivalent mutations, with the reason."""
    reasons = {}
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if lines:
            path, _, within = lines[0].partition(" ")
            removed, added, reason = ([line[2:].strip() for line in lines[1:] if line[0] == sign] for sign in "-+=")
            reasons[path, within.strip("()").removeprefix(MODULE), tuple(removed), tuple(added)] = " ".join(reason)
    return reasons


class Bench:
    """The trees in which mutants run, one per job, and the times of the tests without a mutation."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.free = [copy_tree(folder / f"tree{number}") for number in range(jobs)]
        self.sources: dict[str, str] = {}
        self.times: dict[tuple[str, ...], float] = {}

    def prove(self, tests: tuple[str, ...]) -> None:
        """Raises SystemExit unless `tests` pass without a mutation in every tree."""
        trials = [start(tree, tests, LIMIT, keep_bytecode=True) for tree in self.free]  # the mutants use this bytecode
        for trial in trials:
            if (status := _wait(trial)) != PASSED:
                raise SystemExit(f"{' '.join(tests)}: status {status} without a mutation\n{trial.output()}")
        self.times[tests] = time.monotonic() - trials[0].started

    def start(self, tree: Path, mutation: Mutation, tests: tuple[str, ...]) -> Trial:
        target = tree / mutation.path
        self.sources.setdefault(mutation.path, target.read_text(encoding="utf-8"))
        target.write_text(mutation.source, encoding="utf-8")
        for stale in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
            stale.unlink()  # Python would miss a change that keeps the size and falls into the same second
        return start(tree, tests, FACTOR * self.times[tests] + SLACK)

    def restore(self, tree: Path, mutation: Mutation) -> None:
        (tree / mutation.path).write_text(self.sources[mutation.path], encoding="utf-8")


def _wait(trial: Trial) -> int:
    while (status := trial.poll()) is None:
        time.sleep(0.02)
    return status


def run(bench: Bench, mutations: list[Mutation], *, module_tests_only: bool) -> Iterator[tuple[Mutation, bool, str]]:
    """Yields every mutation, whether it was killed, and by which test (or seconds and exit status). `module_tests_only`: only its
    module's tests run."""
    waiting = [(mutation, MODULES[mutation.path]) for mutation in reversed(mutations)]
    running: list[tuple[Trial, Mutation, tuple[str, ...]]] = []
    try:
        while waiting or running:
            while waiting and bench.free:
                mutation, tests = waiting.pop()
                tree = bench.free.pop()
                running.append((bench.start(tree, mutation, tests), mutation, tests))
            time.sleep(0.02)
            for item in list(running):
                trial, mutation, tests = item
                status = trial.poll()
                if status is None:
                    continue
                running.remove(item)
                bench.restore(trial.folder, mutation)
                bench.free.append(trial.folder)
                if status == PASSED and tests != ALL and not module_tests_only:
                    print(f"its own tests pass: {mutation}", flush=True)
                    waiting.insert(0, (mutation, ALL))
                else:
                    yield mutation, status != PASSED, _how(trial, status)
    finally:
        for trial, _, _ in running:
            trial.end()


def _how(trial: Trial, status: int) -> str:
    lines = [line for line in trial.output().splitlines() if line.startswith(("FAILED", "ERROR"))]
    if status == FAILED and lines:
        return lines[0].split(" - ")[0].partition(" ")[2]
    return f"{time.monotonic() - trial.started:.0f} s, status {status}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, each in a copy of the tree")
    parser.add_argument("--module", default="", help="only modules whose path contains this")
    parser.add_argument("--own", action="store_true", help="only the tests that fit a module, never all of tests/pure")
    options = parser.parse_args()
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in MODULES if options.module in path}
    mutations = draw(sources, options.count, options.seed)
    known = equivalents(EQUIVALENT.read_text(encoding="utf-8"))
    same = [mutation for mutation in mutations if mutation.name in known]
    tried = [mutation for mutation in mutations if mutation.name not in known]
    began, lived = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="cgcompile-mutants-") as folder:
        bench = Bench(Path(folder), options.jobs)
        for tests in sorted({MODULES[mutation.path] for mutation in tried} | (set() if options.own else {ALL})):
            bench.prove(tests)
            print(f"{' '.join(tests)}: {bench.times[tests]:.1f} s without a mutation", flush=True)
        for number, (mutation, killed, how) in enumerate(run(bench, tried, module_tests_only=options.own), 1):
            if killed:
                print(f"{number}/{len(tried)} killed {mutation.path}:{mutation.line} {mutation.kind} ({how})", flush=True)
            else:
                lived.append(mutation)
                print(f"{number}/{len(tried)} SURVIVED {mutation}", flush=True)
    killed_share = 1 - len(lived) / max(len(tried), 1)
    print(
        f"{len(mutations)} mutations of {len(sources)} modules, seed {options.seed}: {len(tried) - len(lived)} killed, "
        f"{len(lived)} survived, {len(same)} equivalent; {killed_share:.1%} of those that are not equivalent were killed, "
        f"in {time.monotonic() - began:.0f} s"
    )
    return 0 if killed_share >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
