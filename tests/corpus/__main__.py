"""Builds models that others published, and compares them with eager PyTorch.

    python -m tests.corpus --target cpu --jobs 2 --only 'transformers/text' --out corpus.jsonl
    python -m tests.corpus --target cuda --jobs 64 --gpus 4 --minutes 8 --out corpus.jsonl
    python -m tests.corpus --target sm_90 --keep bundles        where there is no GPU ...
    python -m tests.corpus --target sm_90 --replay bundles      ... and where it is
    python -m tests.corpus --list
    python -m tests.corpus --table corpus.jsonl

A row per case goes to OUT as it finishes; what OUT has already is left out, so that a run goes on where it was stopped.  Families
take turns, so that the part of a run that was made stands for the whole.  Exit status 1 when a case was wrong, crashed, took too
long, or was stopped by anything but a finding about a line of the model.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .case import Case
from .jobs import Job, Plan, run
from .judge import GOOD, MISSING, TARGETS, Row
from .models import all_cases
from .report import summary


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.corpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated; all for one case after the other")
    parser.add_argument("--only", default="", metavar="REGEX", help="of the names of the cases")
    parser.add_argument("--first", default="", metavar="REGEX", help="what is begun before the others")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--gpus", type=int, default=0, help="to share out among the processes")
    parser.add_argument("--minutes", type=float, default=0.0, help="after which no case is begun")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of a case")
    parser.add_argument("--prove", choices=("none", "interpret"), default="none", help="of bundles for a GPU that is not here")
    parser.add_argument("--out", type=Path, default=Path("corpus.jsonl"))
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the bundles there")
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="compare the bundles that --keep left, on this machine's GPU")
    parser.add_argument("--list", action="store_true", help="the names of the cases")
    parser.add_argument("--table", type=Path, nargs="+", metavar="OUT", help="the summary of earlier runs")
    given = parser.parse_args()
    if given.table:
        print(summary([row for path in given.table for row in read(path)]))
        return 0
    cases = [case for case in all_cases() if re.search(given.only, case.name)]
    members = [each for case in all_cases() for each in case.members if given.only and re.search(given.only, each.name)]
    cases += [each for each in members if not any(each in case.members for case in cases)]
    cases = spread(cases)
    if given.first:
        cases.sort(key=lambda case: not re.search(given.first, case.name))
    if given.list:
        print("\n".join([case.name for case in cases]))
        return 0
    if given.keep:
        given.keep.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        jobs=given.jobs, limit=given.limit, until=time.time() + 60 * given.minutes if given.minutes else 0.0, prove=given.prove,
        keep=given.replay or given.keep, replay=given.replay is not None, gpus=given.gpus,
    )  # fmt: skip
    done = {(row.name, row.target) for row in read(given.out)}
    targets = given.target or ["cpu"]
    jobs = [Job(case, target) for case in cases for target in targets if (case.name, target) not in done]
    with open(given.out, "a") as out:

        def tell(row: Row) -> None:
            out.write(json.dumps(row.plain()) + "\n")
            out.flush()
            print(f"{row.seconds:6.1f} s  {row.target:5}  {row.verdict:14}  {row.name}  {row.message[:160]}", flush=True)

        run(plan, jobs, tell)
    rows = [row for row in read(given.out) if row.target in targets]
    print(summary(rows))
    return 0 if all(row.verdict in (*GOOD, MISSING) for row in rows) else 1


def spread(cases: Sequence[Case]) -> list[Case]:
    """The cases in an order whose every beginning holds each family by its share, so that a run cut short is an even sample."""
    families: dict[str, list[Case]] = {}
    for case in cases:
        families.setdefault(case.family, []).append(case)
    place = {case.name: (2 * index + 1) / len(family) for family in families.values() for index, case in enumerate(family)}
    return sorted(cases, key=lambda case: place[case.name])


def read(path: Path) -> list[Row]:
    """The rows of a run, [] where there is none; a last line that was cut off is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Row(**json.loads(line)) for line in lines if line.endswith("}")]


if __name__ == "__main__":
    sys.exit(main())
