"""Builds third-party models and compares them with eager PyTorch.

    python -m tests.corpus --target cpu --jobs 2 --only 'transformers/text' --results corpus.jsonl
    python -m tests.corpus --target cuda --jobs 64 --gpus 4 --minutes 8 --results corpus.jsonl
    python -m tests.corpus --target sm_90 --keep bundles --bare  on a machine without a GPU ...
    python -m tests.corpus --target sm_90 --replay bundles      ... and then on one with a GPU, with the same results file
    python -m tests.corpus --list
    python -m tests.corpus --target sm_90 --left                cases without a row
    python -m tests.corpus --table corpus.jsonl

When a case ends, its row is written to the results file and synced to disk.  Cases that have a row are skipped.  So a run that was
killed or stopped (an interrupt, --minutes) continues when it is started again.  The order mixes the families (names without their
last part), so that the cases of a stopped run are a fair sample.  Exit status 1 if a case was wrong, crashed, timed out, or failed
without a finding about a line of the model; 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .case import Case
from .jobs import Job, Plan, place_of, run
from .judge import TARGETS
from .models import all_cases
from .report import VERDICTS, summary
from .results import BUILT, GOOD, UNDONE, Row, append, left, read


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.corpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated; all for one case after the other")
    parser.add_argument("--only", default="", metavar="REGEX", help="of the names of the cases")
    parser.add_argument("--first", default="", metavar="REGEX", help="what is begun before the others")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--gpus", type=int, default=0, help="to share out among the processes")
    parser.add_argument("--minutes", type=float, default=0.0, help="after which the run is stopped")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of a case")
    parser.add_argument("--prove", choices=("none", "interpret"), default="none", help="of cross-compiled bundles")
    parser.add_argument("--results", type=Path, default=Path("corpus.jsonl"), metavar="FILE", help="a row a line, added to")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the bundles there")
    parser.add_argument("--bare", action="store_true", help="without the weights that a case makes again: they are few MB then")
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="compare the bundles that --keep left, on this machine's GPU")
    parser.add_argument("--list", action="store_true", help="the names of the cases")
    parser.add_argument("--again", action="append", default=[], choices=VERDICTS, help="rows that are done again; may be repeated")
    parser.add_argument("--left", action="store_true", help="the cases that have no row in the results, after their target")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="the summary of earlier runs")
    args = parser.parse_args()
    if args.table:
        print(summary(read(*args.table)))
        return 0
    cases = [case for case in all_cases() if re.search(args.only, case.name)]
    members = [member for case in all_cases() for member in case.members if args.only and re.search(args.only, member.name)]
    cases += [member for member in members if not any(member in case.members for case in cases)]
    cases = spread(cases)
    if args.first:
        cases.sort(key=lambda case: not re.search(args.first, case.name))
    if args.list:
        print("\n".join([case.name for case in cases]))
        return 0
    targets, before = args.target or ["cpu"], {(row.name, row.target): row for row in read(args.results)}
    undone = (*UNDONE, *args.again, *([BUILT] if args.replay else []))
    waiting = {target: {case.name for case in left(cases, target, before.values(), undone)} for target in targets}
    every = {case.name: case for case in [*cases, *[member for case in cases for member in case.members]]}.values()
    jobs = [Job(case, target) for case in every for target in targets if case.name in waiting[target]]
    if args.left:
        print("\n".join([f"{job.target} {job.case.name}" for job in jobs]))
        return 0
    if args.replay:
        jobs = [job for job in jobs if place_of(args.replay, job).is_dir()]
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        jobs=args.jobs, limit=args.limit, until=time.time() + 60 * args.minutes if args.minutes else 0.0, prove=args.prove,
        keep=args.replay or args.keep, bare=args.bare and args.keep is not None, replay=args.replay is not None,
        gpus=args.gpus,
    )  # fmt: skip

    def tell(row: Row) -> None:
        if args.replay and (built := before.get((row.name, row.target))):
            row = replace(row, seconds=built.seconds + row.seconds, stages={**(built.stages or {}), **(row.stages or {})})
        if not (args.replay and row.verdict in UNDONE):  # no new row: a later run compares the bundle
            append(args.results, row)
        print(f"{row.seconds:6.1f} s  {row.target:5}  {row.verdict:14}  {row.name}  {row.message[:160]}", flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(plan, jobs, tell)
    except KeyboardInterrupt:
        print(f"stopped; the rows are in {args.results}", file=sys.stderr)
        return 130
    rows = [row for row in read(args.results) if row.target in targets]
    print(summary(rows))
    return 0 if all(row.verdict in (*GOOD, *UNDONE) for row in rows) else 1


def spread(cases: Sequence[Case]) -> list[Case]:
    """Returns the cases in an order in which any first part has all families in proportion: a stopped run is a fair sample."""
    families: dict[str, list[Case]] = {}
    for case in cases:
        families.setdefault(case.family, []).append(case)
    place = {case.name: (2 * index + 1) / len(family) for family in families.values() for index, case in enumerate(family)}
    return sorted(cases, key=lambda case: place[case.name])


if __name__ == "__main__":
    sys.exit(main())
