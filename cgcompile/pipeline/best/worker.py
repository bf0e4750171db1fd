"""A process that times the graphs of bundles through the runtime's own executors.  It imports the runtime alone, and no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median

from cgbundle.call.profile import Profile, step_names
from cgbundle.cuda.driver import check, cu
from cgbundle.errors import CgbundleError
from cgbundle.exam import inputs_of
from cgbundle.format.entries import each_entry
from cgbundle.format.schema import Manifest, Program
from cgbundle.gpu.backend import CudaBackend
from cgbundle.loader import open_program
from cgbundle.program import Program as LoadedProgram

from ...errors import BuildError
from ...util.workers import serve
from .timing import GraphTimes, TimingJob

ROUNDS = 15
"""How often each graph is timed; the median counts."""

BURST = 2000.0
"""Microseconds that one timing takes, where a graph may be launched again and again: the start of the first, and the resolution of
the events (0.5 us), then count for nothing."""

LAUNCHES = 200
"""The most launches of one timing."""

WARMUPS = 3

Timer = Callable[[], Sequence[float]]
"""Times the graphs of a program once, in microseconds."""


def work(job: TimingJob) -> list[GraphTimes]:
    """By bundle.  Raises worker-died for one that cannot be loaded or run."""
    with ExitStack() as stack:
        try:
            programs = [stack.enter_context(open_program(path)) for path in job.bundles]
            found: list[GraphTimes] = [{} for _ in programs]
            number = 0
            for manifest in each_entry(programs[0].manifest):
                for row in manifest.programs:
                    for times, each in zip(found, _times(programs, manifest.entry, number), strict=True):
                        times[manifest.entry, row.key] = each
                    number += 1
        except CgbundleError as error:
            raise BuildError("worker-died", f"timing: {error}", error.hint) from error
    return found


def _times(programs: Sequence[LoadedProgram], entry: str, number: int) -> list[tuple[float, ...]]:
    """By program, the median of each graph; the programs take turns."""
    timers = [_timer(program, entry, number) for program in programs]
    rounds = [[timer() for timer in timers] for _ in range(ROUNDS)]
    return [tuple([median(samples) for samples in zip(*own, strict=True)]) for own in zip(*rounds, strict=True)]


def _timer(program: LoadedProgram, entry: str, number: int) -> Timer:
    """A graph alone, which reads nothing but the call's inputs and changes neither them nor state, may be launched again and again.
    All others are timed in whole calls from the first state: what they read may be indices, and has to hold."""
    own = {each.entry: each for each in each_entry(program.manifest)}
    manifest = own[entry]
    row = manifest.programs[number - _first(program.manifest, entry)]
    if [step.kind for step in row.steps] == ["graph"] and not (manifest.written or manifest.changes or manifest.random >= 0):
        return _launches(program, manifest, row, number)
    return _calls(program, manifest, row)


def _first(manifest: Manifest, entry: str) -> int:
    """The number of an entry's first program among all."""
    number = 0
    for each in each_entry(manifest):
        if each.entry == entry:
            break
        number += len(each.programs)
    return number


def _launches(program: LoadedProgram, manifest: Manifest, row: Program, number: int) -> Timer:
    """Times the only graph of a program by many launches between two events."""
    _call(program, manifest, row)
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


def _calls(program: LoadedProgram, manifest: Manifest, row: Program) -> Timer:
    """Times every graph of a program in whole calls, each by two events around its launch."""
    graphs = [name for name, step in zip(step_names(manifest, row), row.steps, strict=True) if step.kind == "graph"]

    def timed() -> Sequence[float]:
        with program.profile() as profile:
            _call(program, manifest, row)
        taken: dict[str, float] = {}
        for span in profile.spans:
            if span.track == Profile.GPU:
                taken[span.name] = (span.end - span.start) * 1e6
        return [taken[name] for name in graphs]

    for _ in range(WARMUPS):
        timed()
    return timed


def _call(program: LoadedProgram, manifest: Manifest, row: Program) -> None:
    """A call with the exam's inputs, from the first state."""
    if any(weight.memory == "state" for weight in manifest.weights):
        program.reset()
    exam = program.open_exam()
    try:
        program[manifest.entry].replay(inputs_of(exam, manifest, row.key))
    finally:
        exam.close()


if __name__ == "__main__":
    serve(work)
