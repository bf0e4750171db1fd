"""The file of a run: a line of JSON for every row, as the cases end, so that whatever ends a run leaves the rows that were done.
Of several rows of one case and target the last one counts.  Needs no torch."""

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
"""`built` is right as far as a machine without the GPU can say."""

UNDONE = (MISSING, STOPPED)
"""What a later run does again: a package was missing, or the run was stopped meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What became of a case.  `seconds` are of the whole process, `stages` of the build's stages and of what follows.  `between`
    says what came of a call at a size that was not recorded: right, not proved, or none."""

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
        """For JSON."""
        return asdict(self)


class Named(Protocol):
    """What `left` needs of a case."""

    @property
    def name(self) -> str:
        """The case's."""

    @property
    def members(self) -> Sequence[Any]:
        """Cases that are run where this one is not right."""


Each = TypeVar("Each", bound=Named)


def append(path: Path, row: Row) -> None:
    """A row behind those that are there.  It is on the disk when this returns.  A line that was cut off is ended first."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        whole = file.read(1) in (b"", b"\n")
        file.write(b"" if whole else b"\n")
        file.write(json.dumps(row.plain()).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(*paths: Path) -> list[Row]:
    """The last row of each case and target, [] where there is no file; lines that were cut off are left out."""
    rows: dict[tuple[str, str], Row] = {}
    for line in [line for path in paths if path.exists() for line in path.read_text(errors="replace").splitlines()]:
        try:
            row = Row(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue
        rows[row.name, row.target] = row
    return list(rows.values())


def left(cases: Iterable[Each], target: str, rows: Iterable[Row], undone: Sequence[str] = UNDONE) -> list[Each]:
    """The cases that have no row for a target but of the verdicts `undone`, and such members of groups that are not right."""
    verdicts = {row.name: row.verdict for row in rows if row.target == target and row.verdict not in undone}
    every = {case.name: case for case in cases}
    alone = [member for case in every.values() if verdicts.get(case.name, RIGHT) not in GOOD for member in case.members]
    return [case for name, case in (every | {member.name: member for member in alone}).items() if name not in verdicts]
