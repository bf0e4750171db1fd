"""Records lowerings on the GPU one after the other.  Cross-compiling needs only the CPU, and runs at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path

from cgbundle.errors import CgbundleError

from ...capture.build import start
from ...capture.processes import RecorderProcesses
from ...capture.recordable import Recordable
from ...capture.recorder import fitting, record_level
from ...capture.request import PRIME, RECORD
from ...targets.build_spec import BuildSpec
from ...util.progress import Tell, named
from .candidates import Candidate, Searched, reason
from .choice import SEARCHED
from .deadline import Deadline, SearchEnded
from .traced import Traceable, trace

CROSS_COMPILE = "cross-compile"

EARLY = 6
"""Processes of the next lowering are started early only if this many processes fit in the GPU's free memory."""

Outcome = Candidate | CgbundleError | None
"""A candidate, the error that prevented it, or None if the time limit was reached."""


def search(
    spec: BuildSpec,
    names: Sequence[str],
    recordable: Recordable,
    traced: Traceable | CgbundleError | None,
    processes: RecorderProcesses,
    deadline: Deadline,
    folder: Path,
    tell: Tell,
) -> Searched:
    """Records the lowerings of `names` in the order of SEARCHED.  The time limit applies only after one lowering was recorded.

    `processes` record the first lowering.  `traced`: the inputs of cross-compiling, or the error that prevents it.  If no lowering
    can be recorded, raises the error of the first one.
    """
    outcomes: dict[str, Outcome] = {}
    on_gpu = [name for name in SEARCHED if name in names and name != CROSS_COMPILE]
    with ExitStack() as stack, ThreadPoolExecutor(1) as threads:
        running = {name: processes for name in on_gpu[:1]}
        for name in on_gpu[1:]:
            (folder / name).mkdir()
            running[name] = stack.enter_context(processes.others(folder / name))
        cross_compiling: Future[Outcome] | None = None
        if CROSS_COMPILE in names and isinstance(traced, Traceable):
            cross_compiling = threads.submit(_traced, spec, traced, recordable, folder, deadline, named(tell, CROSS_COMPILE))
        try:
            for name, following in zip_longest(on_gpu, on_gpu[1:]):
                if following and not deadline.passed() and fitting(EARLY, recordable.need) == EARLY:
                    start(running[following], len(recordable.request.keys), following, spec.options.specialize)
                any_recorded = any(isinstance(outcome, Candidate) for outcome in outcomes.values())
                limit = deadline if any_recorded else Deadline(None)
                outcomes[name] = _recorded(name, recordable, running[name], limit, named(tell, name))
                running[name].end(PRIME)  # a process answers one request
                running[name].end(RECORD)
        except BaseException:
            deadline.end()  # the executor waits for its thread, which ends at the time limit
            raise
        if cross_compiling is not None:
            outcomes[CROSS_COMPILE] = cross_compiling.result()
        elif CROSS_COMPILE in names:
            assert not isinstance(traced, Traceable)
            outcomes[CROSS_COMPILE] = traced
    return searched(outcomes, deadline)


def searched(outcomes: dict[str, Outcome], deadline: Deadline) -> Searched:
    """Sorts outcomes into candidates and reasons.  If there is no candidate, raises the first error in the order of SEARCHED."""
    recorded = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Candidate)}
    refusals = {name: outcome for name in SEARCHED if isinstance(outcome := outcomes.get(name), CgbundleError)}
    if not recorded:
        raise next(iter(refusals.values()))
    over = f"not recorded in the {deadline.seconds:g} seconds that the search may take" if deadline.seconds is not None else ""
    late = {name: over for name, outcome in outcomes.items() if outcome is None}
    return Searched(
        candidates=recorded, left_out=late | {name: reason(refusal) for name, refusal in refusals.items()}, complete=not late
    )


def _recorded(name: str, recordable: Recordable, processes: RecorderProcesses, deadline: Deadline, tell: Tell) -> Outcome:
    if deadline.passed():
        return None
    try:
        with deadline.ending(processes.stop):
            return Candidate(recorded=record_level(recordable, name, processes, tell=tell))
    except SearchEnded:
        return None
    except CgbundleError as refusal:
        return refusal


def _traced(spec: BuildSpec, traced: Traceable, recordable: Recordable, folder: Path, deadline: Deadline, tell: Tell) -> Outcome:
    scratch = folder / CROSS_COMPILE
    scratch.mkdir()
    try:
        return trace(spec, traced, recordable, scratch, deadline.telling(tell), deadline.left())
    except (SearchEnded, TimeoutError):
        return None
    except CgbundleError as refusal:
        return refusal
