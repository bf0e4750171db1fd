"""`python -m tests.soak --minutes 30 --threads 8 [--gpu]`: random calls, sessions, lazy loads, closes and reloads for a long time.

Every answer is compared. Every ten seconds all threads release what they hold and wait, and the resources of the process are
counted. Exit status 1 for a wrong answer, an unexpected error, a hanging thread, or growth after the first quarter of the time.
Needs torch; --gpu needs a GPU, for which the bundles are built.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the import of torch: only the test's threads should run

from .growth import Sample, grown, sample, text
from .models import Case, cases
from .users import Slot, User

EVERY = 10.0
"""Seconds between two samples."""

HANG = 180.0
"""Seconds after which a thread that has not reached a sample counts as hanging."""


class Soak:
    """Threads that use the slots (users.py) until they are stopped. They pause while resources are sampled."""

    def __init__(self, users: list[User], *, gpu: bool) -> None:
        self.times: list[float] = []
        self.samples: list[Sample] = []
        self.errors: list[str] = []
        self._users, self._gpu = users, gpu
        self._pause, self._stop = threading.Event(), threading.Event()
        self._gate = threading.Barrier(len(users) + 1)
        self._threads = [threading.Thread(target=self._work, args=(user,), daemon=True) for user in users]

    def run(self, seconds: float) -> None:
        """Runs until the time is over or an error occurred. If a thread hangs, ends the process with the stacks of all threads."""
        begun = reported = time.monotonic()
        for thread in self._threads:
            thread.start()
        while not self._stop.is_set():
            faulthandler.dump_traceback_later(HANG, exit=True)
            self._stop.wait(min(EVERY, max(begun + seconds - time.monotonic(), 0.0)))
            self._pause.set()
            self._gate.wait()
            self.times.append(time.monotonic() - begun)
            self.samples.append(sample(gpu=self._gpu))
            self._pause.clear()
            if self.times[-1] >= seconds:
                self._stop.set()
            self._gate.wait()
            if time.monotonic() - reported >= 60 or self._stop.is_set():
                reported = time.monotonic()
                print(f"{self.times[-1] / 60:5.1f} min  {text(self.samples[-1])};  {self.counted()}", flush=True)
        for thread in self._threads:
            thread.join()
        faulthandler.cancel_dump_traceback_later()

    def counted(self) -> str:
        """Returns a line with the number of actions so far."""
        total: Counter[str] = Counter()
        for user in self._users:
            total.update(user.counts)
        return ", ".join(f"{number:,} {name}" for name, number in sorted(total.items()))

    def _work(self, user: User) -> None:
        while not self._stop.is_set():
            try:
                while not self._pause.is_set():
                    user.act()
                user.drop_all()
            except BaseException:  # noqa: BLE001 (any error is a find and ends the soak)
                self.errors.append(traceback.format_exc())
                self._stop.set()
                self._pause.wait()
            self._gate.wait()
            self._gate.wait()


def slots(models: list[Case], *, gpu: bool) -> list[Slot]:
    """Returns a slot for each program that all threads share."""
    rows, step, running, draws = models
    if gpu:
        return [
            Slot(rows), Slot(rows, lazy=True, mode="stream", on_miss="chunk"), Slot(step), Slot(step, mode="stream"),
            Slot(draws, lazy=True),
        ]  # fmt: skip
    return [Slot(rows), Slot(rows, on_miss="chunk"), Slot(step), Slot(running), Slot(draws)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpu", action="store_true", help="bundles for this machine's GPU and not for the CPU")
    parser.add_argument("--bundles", type=Path, help="a folder that keeps the bundles for the next time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cgcompile-soak-") as scratch:
        folder = options.bundles or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        device = "cuda" if options.gpu else "cpu"
        models = cases(folder, device)
        shared = slots(models, gpu=options.gpu)
        users = [User(number, options.seed, shared, models, device) for number in range(options.threads)]
        soak = Soak(users, gpu=options.gpu)
        soak.run(60 * options.minutes)
    failures = [*soak.errors, *grown(soak.times, soak.samples)]
    print("\n".join(failures) or "all answers were right, and nothing grew")
    print(f"{options.threads} threads, {soak.times[-1] / 60:.1f} minutes, seed {options.seed}: {soak.counted()}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
