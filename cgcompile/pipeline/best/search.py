"""Every lowering of a program, recorded: those on the GPU one after the other, the one that needs processors alone beside them."""

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
"""Processes of a recording that the GPU's memory has to hold, before those of the next lowering are started beside one's own."""

Outcome = Candidate | CgbundleError | None
"""A candidate, why there is none, or None where the time was over."""


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
    """The lowerings of `names`, in the order of SEARCHED.  The first that is recorded takes the time that it needs.

    `processes` are for the first.  `traced` is what CROSS_COMPILE needs, or why there is none.  Raises the first one's refusal
    where no lowering can be recorded.
    """
    outcomes: dict[str, Outcome] = {}
    left = [name for name in SEARCHED if name in names and name != CROSS_COMPILE]
    with ExitStack() as stack, ThreadPoolExecutor(1) as threads:
        running = {name: processes for name in left[:1]}
        for name in left[1:]:
            (folder / name).mkdir()
            running[name] = stack.enter_context(processes.others(folder / name))
        beside: Future[Outcome] | None = None
        if CROSS_COMPILE in names and isinstance(traced, Traceable):
            beside = threads.submit(_traced, spec, traced, recordable, folder, deadline, named(tell, CROSS_COMPILE))
        try:
            for name, following in zip_longest(left, left[1:]):
                if following and not deadline.passed() and fitting(EARLY, recordable.need) == EARLY:
                    start(running[following], len(recordable.request.keys), following, spec.specialize)
                some = any(isinstance(outcome, Candidate) for outcome in outcomes.values())
                limit = deadline if some else Deadline(None)
                outcomes[name] = _recorded(name, recordable, running[name], limit, named(tell, name))
                running[name].end(PRIME)  # one request is all that a process answers
                running[name].end(RECORD)
        except BaseException:
            deadline.end()  # the thread is waited for
            raise
        if beside is not None:
            outcomes[CROSS_COMPILE] = beside.result()
        elif CROSS_COMPILE in names:
            assert not isinstance(traced, Traceable)
            outcomes[CROSS_COMPILE] = traced
    return searched(outcomes, deadline)


def searched(outcomes: dict[str, Outcome], deadline: Deadline) -> Searched:
    """What came of the lowerings.  Raises the refusal of the first, in the order of SEARCHED, where none was recorded."""
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


def _traced(spec: BuildSpec, what: Traceable, recordable: Recordable, folder: Path, deadline: Deadline, tell: Tell) -> Outcome:
    scratch = folder / CROSS_COMPILE
    scratch.mkdir()
    try:
        return trace(spec, what, recordable, scratch, deadline.telling(tell), deadline.left())
    except (SearchEnded, TimeoutError):
        return None
    except CgbundleError as refusal:
        return refusal
