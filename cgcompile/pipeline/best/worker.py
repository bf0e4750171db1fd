"""A process that times the graphs of bundles with the runtime's executors.  It imports the runtime, and not torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median

from cgbundle.call.profile import Profile, step_names
from cgbundle.cuda.driver import check, cu
from cgbundle.errors import CgbundleError
from cgbundle.format.schema import EntrySpec, Program
from cgbundle.gpu.backend import CudaBackend
from cgbundle.loader import open_program
from cgbundle.program import Program as LoadedProgram
from cgbundle.self_test import inputs_of

from ...errors import BuildError
from ...util.workers import serve
from .timing import GraphTimes, TimingJob

ROUNDS = 15
"""Number of timings of each graph.  The result is their median."""

BURST = 2000.0
"""Target duration in microseconds of one timing of a graph that may be launched repeatedly.  The latency of the first launch and
the resolution of CUDA events (0.5 us) are then negligible."""

LAUNCHES = 200
"""Maximum number of launches in one timing."""

WARMUPS = 3

Timer = Callable[[], Sequence[float]]
"""Times the graphs of a program once, in microseconds."""


def work(job: TimingJob) -> list[GraphTimes]:
    """Returns the times of each bundle.  Raises worker-died for a bundle that cannot be loaded or run."""
    with ExitStack() as stack:
        try:
            programs = [stack.enter_context(open_program(path)) for path in job.bundles]
            graph_times: list[GraphTimes] = [{} for _ in programs]
            number = 0
            for entry in programs[0].manifest.entries:
                for row in entry.programs:
                    for times, time in zip(graph_times, _times(programs, entry, row, number), strict=True):
                        times[entry.name, row.key] = time
                    number += 1
        except CgbundleError as error:
            raise BuildError("worker-died", f"timing: {error}", error.hint) from error
    return graph_times


def _times(programs: Sequence[LoadedProgram], entry: EntrySpec, row: Program, number: int) -> list[tuple[float, ...]]:
    """Returns the median times of each program's graphs, in microseconds.  The programs take turns."""
    timers = [_timer(program, entry, row, number) for program in programs]
    rounds = [[timer() for timer in timers] for _ in range(ROUNDS)]
    return [tuple([median(samples) for samples in zip(*timings, strict=True)]) for timings in zip(*rounds, strict=True)]


def _timer(program: LoadedProgram, entry: EntrySpec, row: Program, number: int) -> Timer:
    """Times launches if the program is one graph that changes no inputs and no state, and draws no random numbers.  Times other
    programs in complete calls from the initial state, because data of earlier launches could contain invalid indices."""
    pure = not (entry.mutated_inputs or entry.mutated_buffers) and program.manifest.random is None
    if pure and [step.kind for step in row.steps] == ["graph"]:
        return _launches(program, entry, row, number)
    return _calls(program, entry, row)


def _launches(program: LoadedProgram, entry: EntrySpec, row: Program, number: int) -> Timer:
    """Times many launches of the only graph between two events."""
    _call(program, entry, row)
    backend = program._backend
    assert isinstance(backend, CudaBackend)

    def timed(count: int) -> float:
        with backend.locked(None) as stream:
            (launch,) = backend.steps(number)
            begin, end = [check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(2)]
            check("cuEventRecord", cu.cuEventRecord(begin, stream))
            for _ in range(count):
                launch(stream)
            check("cuEventRecord", cu.cuEventRecord(end, stream))
            check("cuEventSynchronize", cu.cuEventSynchronize(end))
            milliseconds = float(check("cuEventElapsedTime", cu.cuEventElapsedTime(begin, end)))
            for event in (begin, end):
                check("cuEventDestroy", cu.cuEventDestroy(event))
        return milliseconds * 1000 / count

    timed(WARMUPS)
    count = max(1, min(LAUNCHES, int(BURST / max(timed(WARMUPS), 1.0))))
    return lambda: (timed(count),)


def _calls(program: LoadedProgram, entry: EntrySpec, row: Program) -> Timer:
    """Times every graph in complete calls, with two events around its launch."""
    graphs = [name for name, step in zip(step_names(program.manifest, entry, row), row.steps, strict=True) if step.kind == "graph"]

    def timed() -> Sequence[float]:
        with program.profile() as profile:
            _call(program, entry, row)
        microseconds: dict[str, float] = {}
        for span in profile.spans:
            if span.track == Profile.GPU:
                microseconds[span.name] = (span.end - span.start) * 1e6
        return [microseconds[name] for name in graphs]

    for _ in range(WARMUPS):
        timed()
    return timed


def _call(program: LoadedProgram, entry: EntrySpec, row: Program) -> None:
    """Resets state and runs the program with the inputs of the self-test."""
    if any(weight.memory == "state" for weight in program.manifest.weights):
        program.reset()
    self_test = program.open_self_test()
    try:
        program[entry.name].replay(inputs_of(self_test, entry, row.key))
    finally:
        self_test.close()


if __name__ == "__main__":
    serve(work)
