"""What a recorder process is asked to do: plain values, pickled between two processes of one build, never part of a bundle."""

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
"""The line by which a recorder says that a result is written; every other line is one of progress."""

PRIME, RECORD = "prime", "record"
"""Roles of recorder processes: to fill the compile cache, and to capture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What one recorder process is to do.  `keys` come largest first; `result` is the file to write.

    `role`: PRIME lowers and runs the keys once; RECORD makes a Take of them.  `programs` are saved ExportedPrograms without weights
    by key, files that several keys may share, `calls` a file of torch.save with {key: (example call, self-test call)}, a call being
    (args, kwargs).  `code` names the model whose code registers operators that a program calls, or is "".  `placements` by key,
    {node of its program: reason}, are on the host: where there are any, programs are several regions, and `uploads` is what the
    host makes by key.  `stored` is the bundle's file of weights, and `weights` are rows of all its tensors, those of the host alone
    too.  By key, `written` are positions of the call's tensors that its program writes to, and `self_test_calls` is how often the
    self-test replays it.
    `bounds` are those of what the self-test compares, and `floors` the least of floats that an index is selected from.
    `shift` makes this process's addresses differ from another's.  `varying`: weights that are state of any number of rows, of which
    this process has `more` than the others; it tells the program.
    """

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
    """A request for a process whose state has more rows where it may have any number; all begins where it does for the others."""
    weights = [
        replace(row, shape=(row.shape[0] + more, *row.shape[1:])) if row.name in request.varying else row for row in request.weights
    ]
    return replace(request, weights=tuple(weights), more=more)
