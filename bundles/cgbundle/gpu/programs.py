"""The programs of a session: each bound to its memories when it is first needed, and timed while a profile watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..cuda.driver import Relaxed
from ..cuda.memory import Memories, Output
from ..cuda.stream_order import StepClock, StreamOrder
from ..errors import CallError
from .binding import BoundProgram, DeviceOutputs, Elsewhere, Executors, bind
from .shared import Shared

if TYPE_CHECKING:
    from ..call.profile import Profile
    from .host_steps import HostSteps


class Programs:
    """By number, the programs of `shared` over a session's memories.  The context must be current.

    `ready` and `results`: those that are bound, and the outputs that each gives.  `late`: a call may come before its program is
    bound; it is refused inside a capture then, where binding cannot be.  `copy_out` as `DeviceOutputs` has it.
    """

    def __init__(
        self,
        shared: Shared,
        memories: Memories,
        executors: Executors,
        host: HostSteps | None,
        order: StreamOrder,
        copy_out: Callable[[int, int, int], Output],
        *,
        late: bool,
    ) -> None:
        self._shared, self._memories, self._executors, self._host = shared, memories, executors, host
        self._order, self._copy_out, self._late = order, copy_out, late
        self.ready: dict[int, BoundProgram] = {}
        self.results: dict[int, DeviceOutputs] = {}
        self._elsewhere: dict[tuple[int, Elsewhere], BoundProgram] = {}  # programs over inputs that lie where a call left them
        self._unwatched: dict[int, BoundProgram] = {}
        self._clock: StepClock | None = None

    @property
    def watched(self) -> bool:
        """Whether a profile watches."""
        return self._clock is not None

    def bind(self, numbers: Iterable[int]) -> None:
        """Binds programs, for calls to find.  Raises as `binding.bind`."""
        for number in numbers:
            bound = self._bound(number)
            self.results[number] = DeviceOutputs(bound.outputs, self._shared.context.index, self._copy_out)
            if self._clock is not None:
                self._unwatched[number], bound = bound, self._timed(number, bound)
            self.ready[number] = bound

    def bind_chained(self) -> None:
        """Binds every program over all that it may take of one program of another entry; other mixtures when a call has one."""
        for number, rows in self._chainable():
            if (number, rows) not in self._elsewhere:
                self._bind_elsewhere(number, rows)

    def wanted(self) -> list[tuple[int, Elsewhere]]:
        """All that can be bound before calls ask for it, for `bind_one`."""
        return [*[(number, ()) for number in range(len(self._shared.programs))], *self._chainable()]

    def bind_one(self, number: int, elsewhere: Elsewhere) -> None:
        """Binds what is wanted, unless it has been meanwhile."""
        if elsewhere and (number, elsewhere) not in self._elsewhere:
            self._bind_elsewhere(number, elsewhere)
        elif not elsewhere and number not in self.ready:
            self.bind((number,))

    def first_used(self, number: int, stream: Any) -> BoundProgram:
        """A program that no call has used yet.  Raises capture-refused inside a capture, where the caller has asked for that."""
        self._refuse_late(number, stream)
        with Relaxed():
            self.bind((number,))
        return self.ready[number]

    def chained(self, number: int, bound: BoundProgram, addresses: Sequence[int], stream: Any) -> BoundProgram:
        """The program over those of its inputs that lie where another entry's call has left them; raises as `first_used`."""
        found = [(position, places.get(addresses[position], -1)) for position, places in bound.chained]
        elsewhere = tuple([each for each in found if each[1] >= 0])
        if not elsewhere:
            return bound
        known = self._elsewhere.get((number, elsewhere))
        if known is None:
            self._refuse_late(number, stream)
            with Relaxed():
                known = self._bind_elsewhere(number, elsewhere)
        return known

    def watch(self, profile: Profile | None) -> None:
        """Times the steps of every program for a profile from now on; None ends it, and adds what is still missing there."""
        if self._clock is not None:
            self._clock.settle()
            self.ready.update(self._unwatched)
            self._unwatched, self._clock = {}, None
        self._elsewhere.clear()
        if profile is not None:
            self._clock = StepClock(self._order.default, profile)
            for number, bound in list(self.ready.items()):
                self._unwatched[number], self.ready[number] = bound, self._timed(number, bound)

    def clear(self) -> None:
        """Ends what watches, and forgets every program."""
        self.watch(None)
        self.ready.clear()
        self.results.clear()

    def _refuse_late(self, number: int, stream: Any) -> None:
        if self._late and self._order.capturing(stream):
            raise CallError(
                "capture-refused",
                f"int_key {self._shared.programs[number].key} is not built yet, and cannot be while a CUDA graph is captured",
                "call it once before the capture, or load the bundle with lazy=False",
            )

    def _chainable(self) -> Iterator[tuple[int, Elsewhere]]:
        for number, inputs in self._shared.chained.items():
            sources = dict.fromkeys([source for places in inputs.values() for source in places.values()])
            for chosen in sources:
                yield (
                    number,
                    tuple([(at, offset) for at, places in inputs.items() for offset, source in places.items() if source == chosen]),
                )

    def _bind_elsewhere(self, number: int, elsewhere: Elsewhere) -> BoundProgram:
        bound = self._bound(number, elsewhere)
        self._elsewhere[number, elsewhere] = made = bound if self._clock is None else self._timed(number, bound)
        return made

    def _bound(self, number: int, elsewhere: Elsewhere = ()) -> BoundProgram:
        shared = self._shared
        chained = shared.chained.get(number, {})
        with shared.lock:
            return bind(
                shared.programs[number], shared.entries[number], self._memories, self._executors, self._host, chained, elsewhere
            )

    def _timed(self, number: int, bound: BoundProgram) -> BoundProgram:
        """A program whose steps are timed for the profile that watches."""
        from ..call.profile import step_names  # few programs are profiled

        assert self._clock is not None
        program = self._shared.programs[number]
        rows = zip(step_names(self._shared.entries[number], program), program.steps, bound.steps, strict=True)
        clock = self._clock
        timed = [clock.profile.timed(name, run) if step.kind == "host" else clock.timed(name, run) for name, step, run in rows]
        return bound._replace(steps=timed)
