"""Times of the steps of a program on a GPU, for a profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from ..call.profile import Profile, step_names
from ..cuda.driver import call
from ..cuda.libcuda import EVENT_DEFAULT
from ..format.schema import EntrySpec, Manifest, Program

PENDING = 4096
"""Steps that a profile has timed and not read yet: each keeps two events."""


class StepClock:
    """Times what is enqueued on streams, by an event before it and one behind, for a profile.

    The GPU's clock is tied to the CPU's once, when this is made: the context must be current, and is waited for.
    """

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
        """The steps of a program, timed: those of the host by the CPU's clock."""
        rows = zip(step_names(manifest, entry, program), program.steps, steps, strict=True)
        return [self.profile.timed(name, run) if step.kind == "host" else self.timed(name, run) for name, step, run in rows]

    def timed(self, name: str, step: Callable[[Any], None]) -> Callable[[Any], None]:
        """`step`, a function of a stream, which is timed there under a name."""

        def timed(stream: Any) -> None:
            if len(self._pending) >= PENDING:
                self._read()
            before = _mark(stream)
            step(stream)
            self._pending.append((name, before, _mark(stream)))

        return timed

    def settle(self) -> None:
        """Waits for what was timed, and adds it to the profile.  Nothing is timed any more."""
        self._read()
        call("cuEventDestroy", self._first)

    def _read(self) -> None:
        for name, before, after in self._pending:
            call("cuEventSynchronize", after)
            start = self._zero + call("cuEventElapsedTime", self._first, before) / 1e3
            taken = call("cuEventElapsedTime", before, after) / 1e3
            self.profile.add(name, start, start + taken, self.profile.GPU)
            call("cuEventDestroy", before)
            call("cuEventDestroy", after)
        self._pending.clear()


def _mark(stream: Any) -> Any:
    """A new event with a time, behind what the stream holds."""
    event = call("cuEventCreate", EVENT_DEFAULT)
    call("cuEventRecord", event, stream)
    return event
