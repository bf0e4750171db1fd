"""Times of program steps on a GPU, for a profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from ..call.profile import Profile, step_names
from ..cuda.driver import call
from ..cuda.libcuda import EVENT_DEFAULT
from ..format.schema import EntrySpec, Manifest, Program

PENDING = 4096  # timed steps that are not read yet, with two events each


class StepClock:
    """Times work on streams by events before and after it. The GPU's clock is synchronized with the CPU's once, in the constructor,
    which needs the current context and waits."""

    __slots__ = ("_first", "_pending", "_zero", "profile")

    def __init__(self, stream: Any, profile: Profile) -> None:
        self.profile = profile
        self._first = _mark(stream)
        call("cuEventSynchronize", self._first)
        self._zero = perf_counter()
        self._pending: list[tuple[str, Any, Any]] = []

    def steps(
        self, manifest: Manifest, entry: EntrySpec, program: Program, steps: Sequence[Callable[[Any], None]]
    ) -> list[Callable[[Any], None]]:
        """The program's steps, timed; host steps by the CPU's clock."""
        rows = zip(step_names(manifest, entry, program), program.steps, steps, strict=True)
        return [self.profile.timed(name, run) if step.kind == "host" else self.timed(name, run) for name, step, run in rows]

    def timed(self, name: str, step: Callable[[Any], None]) -> Callable[[Any], None]:

        def timed(stream: Any) -> None:
            if len(self._pending) >= PENDING:
                self._read()
            before = _mark(stream)
            step(stream)
            self._pending.append((name, before, _mark(stream)))

        return timed

    def settle(self) -> None:
        """Waits for timed work, adds it to the profile, and stops timing."""
        self._read()
        call("cuEventDestroy", self._first)

    def _read(self) -> None:
        for name, before, after in self._pending:
            call("cuEventSynchronize", after)
            start = self._zero + call("cuEventElapsedTime", self._first, before) / 1e3
            seconds = call("cuEventElapsedTime", before, after) / 1e3
            self.profile.add(name, start, start + seconds, self.profile.GPU)
            call("cuEventDestroy", before)
            call("cuEventDestroy", after)
        self._pending.clear()


def _mark(stream: Any) -> Any:
    event = call("cuEventCreate", EVENT_DEFAULT)
    call("cuEventRecord", event, stream)
    return event
