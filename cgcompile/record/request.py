"""What a recorder process is asked to do.  Written by the parent, read by `child`: a pickle between two processes of one
build, of plain values only, which never becomes part of a bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgbundle.schema import Weight
from cgcompile.record.rows import Key

PREFIX = "@cgcompile "
"""Starts a line of progress on a recorder's standard output; every other line is the user's program talking."""

REFUSED = 3
"""Exit status of a recorder process that wrote a refusal (class name, message, hint) to its result file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One recorder process.

    `role`: "prime" lowers and runs the keys once, to fill the compile cache; "record" makes a Take of them.  `program` is a saved
    ExportedProgram, `calls` a file of torch.save with {key: (example call, fresh call)}, a call being (args, kwargs).
    `keys` come largest first.  `shift` makes this process's addresses differ from another's.  `result` is the file to write.
    """

    role: str
    program: Path
    calls: Path
    result: Path
    keys: tuple[Key, ...]
    level: str
    specialize: str
    weights: tuple[Weight, ...]
    weights_end: int
    inputs_end: int
    settings: dict[str, Any]
    shift: bool
