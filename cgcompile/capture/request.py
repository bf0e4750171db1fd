"""What a recorder process is asked to do.  Written by the parent, read by `child`: a pickle between two processes of one
build, of plain values only, which never becomes part of a bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgbundle.format.schema import IntKey, Weight

from ..targets.cuda.memory_layout import Landing

PREFIX = "@cgcompile "
"""Starts a line of progress on a recorder's standard output; every other line is the user's program talking."""

REFUSED = 3
"""Exit status of a recorder process that wrote a refusal (class name, message, hint) to its result file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One recorder process.

    `role`: "prime" lowers and runs the keys once, to fill the compile cache; "record" makes a Take of them.  `program` is a saved
    ExportedProgram, `calls` a file of torch.save with {key: (example call, fresh call)}, a call being (args, kwargs).
    `code` names the model whose code registers operators that the program calls, or is "".  `placements` (node of the program,
    reason) are on the host: where there are any, the program is several regions, and `landing` says by key where in the inputs
    buffer what the host makes is put, as (value, offset, dtype, shape, strides).
    `written`: positions of the call's tensors that the program writes to.  `exam_calls`: how often the exam replays a key.
    `keys` come largest first.  `shift` makes this process's addresses differ from another's.  `result` is the file to write.
    """

    role: str
    program: Path
    calls: Path
    result: Path
    keys: tuple[IntKey, ...]
    level: str
    specialize: str
    code: str
    placements: tuple[tuple[str, str], ...]
    landing: dict[IntKey, tuple[Landing, ...]]
    weights: tuple[Weight, ...]
    weights_end: int
    state_end: int
    inputs_end: int
    settings: dict[str, Any]
    shift: bool
    written: tuple[int, ...] = ()
    exam_calls: int = 1
