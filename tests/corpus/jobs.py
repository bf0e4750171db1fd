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
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.helpers.places import ROOT

from .case import Case
from .results import BUILT, CRASHED, GOOD, MISSING, STOPPED, TIMEOUT, Row

LOADING = 30.0
"""Seconds that a bundle which was built has at least to be loaded and compared."""

OFTEN = 0.5
"""Seconds between two looks at whether the run was stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a run is done.  `limit`: seconds of a case; `until`: when the run is stopped (`time.time`), 0 for never.

    `keep`: a folder that bundles are left in, or None; `bare`: without the weights that cases make again; `replay`: they are there,
    and are compared alone.
    `gpus`: how many there are to share out, 0 for what the processes find.  Where there are some, they also run what was built
    as if there were none (`sm_90`).
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
    """Runs the jobs in order, and those of a group's members where the group is not right.  `tell` is called under a lock.  What is
    running when the run is stopped, by `until` or an interrupt, is ended and told as such; the interrupt goes on."""
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
            stop.set()  # the threads are waited for


def place_of(folder: Path, job: Job) -> Path:
    """Where the bundle of a job lies."""
    return folder / f"{job.target}+{job.case.name.replace('/', '+')}.cgb"


def _share(number: int, jobs: int) -> set[int]:
    """The processors of one of so many jobs at a time: two at least, so that a build compiles no more kernels at once than that."""
    every = sorted(os.sched_getaffinity(0))
    return {every[(number * len(every) // jobs + more) % len(every)] for more in range(max(2, len(every) // jobs))}


def _own(jobs: int) -> int:
    """The processors of a job that no other of the jobs has, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // jobs)


def _gpu(number: int, gpus: int, visible: str) -> str | None:
    """The GPU of a job, by its name in CUDA_VISIBLE_DEVICES where that is set; None where there are none to share out."""
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
    """What a process of the case says, or how it ended.  `gpu`: its number, "" for none, None for what the machine has."""
    begun = time.perf_counter()
    nothing = Row(name=job.case.name, target=job.target, verdict=CRASHED)
    arguments = [job.case.name, job.target, str(bundle), plan.prove, str(os.getpid()), *more]
    command = [sys.executable, "-m", "tests.corpus.worker", *arguments]
    share = _share(number, plan.jobs)
    # one thread each; kernels are compiled by as many processes as the case has processors for itself
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": str(_own(plan.jobs)), "TMPDIR": str(scratch),
        "CACHE_PATH": str(scratch),  # se3-transformer-pytorch keeps tensors there, on the GPU where the first process has one
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
    taken = time.perf_counter() - begun
    if process.returncode == 0 and lines and lines[-1].startswith('{"name"'):
        return replace(Row(**json.loads(lines[-1])), seconds=taken)
    said = lines[-1] if lines else "nothing"
    return replace(nothing, message=f"exit status {process.returncode}: {said}", seconds=taken)
