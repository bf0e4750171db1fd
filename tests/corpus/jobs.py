"""The processes of a run: several at a time, each with a limit, spread over the GPUs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tests.helpers.places import ROOT

from .case import Case
from .judge import CRASHED, GOOD, MISSING, TIMEOUT, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a run is done.  `limit`: seconds of a case; `until`: when no more cases are begun (`time.time`), 0 for never.

    `keep`: a folder that bundles are left in, or None; `replay`: they are there, and are compared alone.
    `gpus`: how many there are.
    """

    jobs: int
    limit: float
    until: float
    prove: str
    keep: Path | None
    replay: bool
    gpus: int


@dataclass(frozen=True, slots=True)
class Job:
    """A case for a target."""

    case: Case
    target: str


def run(plan: Plan, jobs: Iterable[Job], tell: Callable[[Row], None]) -> None:
    """Runs the jobs in order, and those of a group's members where the group is not right.  `tell` is called under a lock."""
    todo, lock = deque(jobs), threading.Lock()

    def work(number: int) -> None:
        while not (plan.until and time.time() > plan.until):
            with lock:
                if not todo:
                    return
                job = todo.popleft()
            row = _run(plan, job, number)
            with lock:
                tell(row)
                if row.verdict not in (*GOOD, MISSING):
                    todo.extend([Job(member, job.target) for member in job.case.members])

    with ThreadPoolExecutor(plan.jobs) as pool:
        for each in [pool.submit(work, number) for number in range(plan.jobs)]:
            each.result()


def place_of(folder: Path, job: Job) -> Path:
    """Where the bundle of a job lies."""
    return folder / f"{job.target}+{job.case.name.replace('/', '+')}.cgb"


def _share(number: int, jobs: int) -> set[int]:
    """The processors of one of so many jobs at a time: two at least, so that a build compiles no more kernels at once than that."""
    every = sorted(os.sched_getaffinity(0))
    return {every[(number * len(every) // jobs + more) % len(every)] for more in range(max(2, len(every) // jobs))}


def _run(plan: Plan, job: Job, number: int) -> Row:
    missing = job.case.missing()
    nothing = Row(name=job.case.name, target=job.target, verdict=MISSING, message=", ".join(missing))
    if missing:
        return nothing
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="corpus-") as scratch:
        bundle = place_of(plan.keep or Path(scratch), job)
        if plan.replay and not bundle.is_dir():
            return replace(nothing, message="no bundle")
        if bundle.exists() and not plan.replay:
            shutil.rmtree(bundle)
        command = [sys.executable, "-m", "tests.corpus.worker", job.case.name, job.target, str(bundle), plan.prove]
        gpu = str(number % plan.gpus) if plan.gpus and (job.target == "cuda" or plan.replay) else ""
        # one thread each: there are as many processes as processors
        environment = {
            **os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TMPDIR": scratch, "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        with open(Path(scratch) / "log", "w+b") as log:
            process = subprocess.Popen(
                [*command, *(["replay"] if plan.replay else [])], stdout=log, stderr=log, cwd=ROOT, env=environment,
                start_new_session=True,
            )  # fmt: skip
            os.sched_setaffinity(process.pid, _share(number, plan.jobs))
            try:
                process.wait(plan.limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return replace(nothing, verdict=TIMEOUT, message=f"over {plan.limit:.0f} s", seconds=time.perf_counter() - begun)
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
    taken = time.perf_counter() - begun
    if process.returncode == 0 and lines and lines[-1].startswith('{"name"'):
        return replace(Row(**json.loads(lines[-1])), seconds=taken)
    said = lines[-1] if lines else "nothing"
    return replace(nothing, verdict=CRASHED, message=f"exit status {process.returncode}: {said}", seconds=taken)
