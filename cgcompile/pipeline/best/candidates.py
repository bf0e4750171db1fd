"""A program lowered in one way at every int_key: what is proved and timed, or why it is left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cgbundle.errors import CgbundleError

from ...capture.recorder import Recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """`folded`: names of weights that something was computed from which the recording holds.  `configurations`: the text of
    `offline.trace.KERNELS`, "" where the kernels are not ours."""

    recorded: Recorded = field(repr=False)
    folded: frozenset[str] = frozenset()
    configurations: str = field(default="", repr=False)


def reason(refusal: CgbundleError) -> str:
    """Why a lowering is left out, as the bundle says it: without the place of a log, which lies on the machine of the build."""
    return LOG.sub("", str(refusal))


LOG = re.compile(r" \(log: [^)]*\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """Candidates by the name of their lowering, and of all others the reason why they are left out.  `complete`: no reason is that
    the time was over."""

    candidates: Mapping[str, Candidate]
    left_out: Mapping[str, str]
    complete: bool
