"""The results file of a run: a line of JSON for every row, written when its case ends, so that a killed run keeps its rows. The
last row of a case and target counts. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

RIGHT, REFUSED, MISSING, BUILT = "right", "refused", "not installed", "built"
FAILED, WRONG, CRASHED, TIMEOUT, STOPPED = "compiler error", "wrong", "crash", "timeout", "stopped"
GOOD = (RIGHT, REFUSED, BUILT)
"""Verdicts that count as passed. `built` means that this machine has no GPU to run the bundle."""

UNDONE = (MISSING, STOPPED)
"""Verdicts of cases that a later run repeats: a package was missing, or the run was stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The result of a case. `seconds` are those of the whole process; `stages` are those of the build's stages and of later steps.
    `between` is the outcome of a call at a size that was not recorded: right, not proved, or none."""

    name: str
    target: str
    verdict: str
    seconds: float = 0.0
    message: str = ""
    code: str = ""
    place: str = ""
    between: str = ""
    error: float = 0.0
    stages: Mapping[str, float] | None = None

    def plain(self) -> dict[str, Any]:
        """Returns the row as plain values for JSON."""
        return asdict(self)


class Named(Protocol):
    """The attributes of a case that `left` uses."""

    @property
    def name(self) -> str:
        """The name of the case."""

    @property
    def members(self) -> Sequence[Any]:
        """Cases that run if this one is not right."""


Each = TypeVar("Each", bound=Named)


def append(path: Path, row: Row) -> None:
    """Appends a row and syncs it to disk. Ends an incomplete last line first."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        complete = file.read(1) in (b"", b"\n")
        file.write(b"" if complete else b"\n")
        file.write(json.dumps(row.plain()).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(*paths: Path) -> list[Row]:
    """Returns the last row of each case and target; [] if there is no file. Skips incomplete lines."""
    rows: dict[tuple[str, str], Row] = {}
    for line in [line for path in paths if path.exists() for line in path.read_text(errors="replace").splitlines()]:
        try:
            row = Row(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue
        rows[row.name, row.target] = row
    return list(rows.values())


def left(cases: Iterable[Each], target: str, rows: Iterable[Row], undone: Sequence[str] = UNDONE) -> list[Each]:
    """Returns the cases without a row for a target, or with a verdict in `undone`; also members of groups that are not right."""
    verdicts = {row.name: row.verdict for row in rows if row.target == target and row.verdict not in undone}
    every = {case.name: case for case in cases}
    alone = [member for case in every.values() if verdicts.get(case.name, RIGHT) not in GOOD for member in case.members]
    return [case for name, case in (every | {member.name: member for member in alone}).items() if name not in verdicts]
