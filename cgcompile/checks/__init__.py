"""check: what a model does that a CUDA graph cannot replay, as findings.  Pure functions over the exported program.

subject       what rules look at, and how they say what they found
flow          which operations follow an obstacle to the host
rules         the table of all rules, and the rules themselves by kind: scalars, shapes, devices, control, randomness, operators,
              writes, sizes
placements    findings -> which nodes run on the host, and why
judging       check and refuse; which inputs the program writes to
"""

from __future__ import annotations

from .judging import check, functional, refuse, refuse_written, state_buffers, written_inputs
from .placements import placements
from .rules import RULES, names
from .subject import HOST, NOTE, REFUSE, Subject

__all__ = [
    "HOST", "NOTE", "REFUSE", "RULES", "Subject", "check", "functional", "names", "placements", "refuse", "refuse_written",
    "state_buffers", "written_inputs",
]  # fmt: skip
