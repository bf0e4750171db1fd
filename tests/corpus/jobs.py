"""Runs the processes of the cases: several at a time, each with a time limit, spread over the GPUs."""

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
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.helpers.places import ROOT

from .case import Case
from .results import BUILT, CRASHED, GOOD, MISSING, STOPPED, TIMEOUT, Row

LOADING = 30.0
"""Minimum seconds for loading and comparing a bundle after its build."""

OFTEN = 0.5
"""Seconds between two checks whether the run was stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Settings of a run. `limit`: seconds of a case. `until`: time at which the run stops (`time.time`), 0 for never. `keep`: a
    folder in which bundles are kept, or None. `bare`: keep them without weights that cases make again. `replay`: only compare
    bundles of this folder.

    `gpus`: number of GPUs to share out, 0 to use what the processes find. If there are GPUs, cross-compiled bundles (`sm_90`) run
    on them too.
    """

    jobs: int
    limit: float
    until: float
    prove: str
    keep: Path | None
    bare: bool
    replay: bool
    gpus: int


@dataclass(frozen=True, slots=True)
class Job:
    """A case for a target."""

    case: Case
    target: str


def run(plan: Plan, jobs: Iterable[Job], tell: Callable[[Row], None]) -> None:
    """Runs the jobs in order, and also the members of each case that is not right. `tell` receives each row, one at a time. When
    the run is stopped by `until` or an interrupt, running jobs are ended and reported as stopped. The interrupt is raised again."""
    todo, lock, stop = deque(jobs), threading.Lock(), threading.Event()

    def work(number: int) -> None:
        while not _stopped(plan, stop):
            with lock:
                if not todo:
                    return
                job = todo.popleft()
            row = _run(plan, job, number, stop)
            with lock:
                tell(row)
                if row.verdict not in (*GOOD, MISSING, STOPPED):
                    todo.extend([Job(member, job.target) for member in job.case.members])

    with ThreadPoolExecutor(plan.jobs) as pool:
        try:
            for future in [pool.submit(work, number) for number in range(plan.jobs)]:
                future.result()
        finally:
            stop.set()  # the executor waits for its threads


def place_of(folder: Path, job: Job) -> Path:
    """Returns the path of a job's bundle."""
    return folder / f"{job.target}+{job.case.name.replace('/', '+')}.cgb"


def _share(number: int, jobs: int) -> set[int]:
    """Returns the processors of job `number` of `jobs` concurrent ones; at least two, because a build compiles two kernels at
    once."""
    cpus = sorted(os.sched_getaffinity(0))
    return {cpus[(number * len(cpus) // jobs + offset) % len(cpus)] for offset in range(max(2, len(cpus) // jobs))}


def _own(jobs: int) -> int:
    """Returns the number of processors that a job does not share with others, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // jobs)


def _gpu(number: int, gpus: int, visible: str) -> str | None:
    """Returns the GPU of a job, by its name in CUDA_VISIBLE_DEVICES if that is set; None if GPUs are not shared out."""
    names = visible.split(",") if visible else [str(index) for index in range(gpus)]
    return names[number % min(gpus, len(names))] if gpus else None


def _run(plan: Plan, job: Job, number: int, stop: threading.Event) -> Row:
    missing = job.case.missing()
    if missing:
        return Row(name=job.case.name, target=job.target, verdict=MISSING, message=", ".join(missing))
    gpu = _gpu(number, plan.gpus, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    with tempfile.TemporaryDirectory(prefix="corpus-", ignore_cleanup_errors=True) as scratch:
        bundle = place_of(plan.keep or Path(scratch), job)
        if plan.replay:
            return _process(plan, job, number, stop, bundle, Path(scratch), gpu, "replay")
        if bundle.exists():
            shutil.rmtree(bundle)
        row = _process(
            plan, job, number, stop, bundle, Path(scratch), gpu if job.target == "cuda" else "", *(["bare"] if plan.bare else [])
        )
        if row.verdict != BUILT or gpu is None or not bundle.is_dir():
            return row
        rest = replace(plan, limit=max(LOADING, plan.limit - row.seconds))
        after = _process(rest, job, number, stop, bundle, Path(scratch), gpu, "replay")
    return replace(after, seconds=row.seconds + after.seconds, stages={**(row.stages or {}), **(after.stages or {})})


def _stopped(plan: Plan, stop: threading.Event) -> bool:
    return stop.is_set() or bool(plan.until and time.time() > plan.until)


def _process(
    plan: Plan, job: Job, number: int, stop: threading.Event, bundle: Path, scratch: Path, gpu: str | None, *more: str
) -> Row:
    """Runs a process of the case and returns its row. `gpu` is the GPU's name, "" for none, None for the GPUs of the machine."""
    begun = time.perf_counter()
    nothing = Row(name=job.case.name, target=job.target, verdict=CRASHED)
    arguments = [job.case.name, job.target, str(bundle), plan.prove, str(os.getpid()), *more]
    command = [sys.executable, "-m", "tests.corpus.worker", *arguments]
    share = _share(number, plan.jobs)
    # one OpenMP thread per process, and a compile process for each processor that only this case uses
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": str(_own(plan.jobs)), "TMPDIR": str(scratch),
        "CACHE_PATH": str(scratch),  # se3-transformer-pytorch caches tensors there, on the GPU if the first process has one
        **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
    }  # fmt: skip
    with open(scratch / "log", "w+b") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment, start_new_session=True)
        os.sched_setaffinity(process.pid, share)
        end = begun + plan.limit
        while process.poll() is None and time.perf_counter() < end and not _stopped(plan, stop):
            with suppress(subprocess.TimeoutExpired):
                process.wait(min(OFTEN, max(0.0, end - time.perf_counter())))
        if process.poll() is None:
            verdict, why = (STOPPED, "the run was stopped") if _stopped(plan, stop) else (TIMEOUT, f"over {plan.limit:.0f} s")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return replace(nothing, verdict=verdict, message=why, seconds=time.perf_counter() - begun)
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    seconds = time.perf_counter() - begun
    if process.returncode == 0 and lines and lines[-1].startswith('{"name"'):
        return replace(Row(**json.loads(lines[-1])), seconds=seconds)
    last_line = lines[-1] if lines else "nothing"
    return replace(nothing, message=f"exit status {process.returncode}: {last_line}", seconds=seconds)
