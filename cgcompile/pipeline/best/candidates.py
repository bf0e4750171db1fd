"""A program lowered in one way at every int_key: what is proved and timed, or why it is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...capture.recorder import Recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """`folded`: names of weights that something was computed from which the recording holds.  `configurations`: the text of
    `offline.trace.KERNELS`, "" where the kernels are not ours."""

    recorded: Recorded = field(repr=False)
    folded: frozenset[str] = frozenset()
    configurations: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """Candidates by the name of their lowering, and of all others the reason why they are left out.  `complete`: no reason is that
    the time was over."""

    made: Mapping[str, Candidate]
    left_out: Mapping[str, str]
    complete: bool
