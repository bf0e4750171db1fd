"""Requests to recorder processes: plain values, pickled between two processes of one build, and never part of a bundle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cgbundle.format.schema import IntKey, Weight

    from ..targets.memory_layout import UploadedValue
    from ..transforms.error_bounds import ErrorBound

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of one call: (args, kwargs)."""

DONE = "done"
"""The line that a recorder process sends after it wrote a result.  Every other line reports progress."""

PRIME, RECORD = "prime", "record"
"""Roles of recorder processes: PRIME fills the compile cache, RECORD captures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request to one recorder process.

    `role`: PRIME lowers and runs the keys once; RECORD makes a Take of them.  `programs`: by key, files of saved ExportedPrograms
    without weights, which several keys may share.  `calls`: a torch.save file, {key: (example call, self-test call)}.  `result`:
    the file to write.  `keys`: largest first.  `code`: files and modules to import first (`inlining.code_of`), or "".
    `placements`: by key, nodes on the host as {node: reason}; if any, programs have several regions.  `uploads`: by key, values
    that the host computes.  `stored`: the bundle's weights file; `weights`: rows of all its tensors, also those that only the host
    reads.  `shift`: makes this process's addresses differ from the other recorder's.  `written`: by key, which of the call's
    tensors the program writes to.  `self_test_calls`: by key, how often the self-test calls the program.  `varying`: state with a
    variable number of rows; this process has `more` rows than the other recorder.  `bounds`: error bounds of the values that the
    self-test compares.  `floors`: smallest bound for floats from which an index is selected (`selection_floor`)."""

    role: str
    programs: dict[IntKey, Path]
    calls: Path
    result: Path
    keys: tuple[IntKey, ...]
    level: str
    specialize: str
    code: str
    placements: dict[IntKey, dict[str, str]]
    uploads: dict[IntKey, tuple[UploadedValue, ...]]
    stored: Path
    weights: tuple[Weight, ...]
    weights_end: int
    state_end: int
    inputs_end: int
    settings: dict[str, Any]
    shift: bool
    written: dict[IntKey, tuple[int, ...]]
    self_test_calls: dict[IntKey, int]
    varying: tuple[str, ...] = ()
    more: int = 0
    bounds: dict[IntKey, tuple[ErrorBound, ...]] = field(default_factory=dict)
    floors: dict[IntKey, float] = field(default_factory=dict)


def with_more_rows(request: Request, more: int) -> Request:
    """Returns a request for a process that has `more` rows of varying state than other processes.  All offsets stay the same."""
    weights = [
        replace(row, shape=(row.shape[0] + more, *row.shape[1:])) if row.name in request.varying else row for row in request.weights
    ]
    return replace(request, weights=tuple(weights), more=more)
