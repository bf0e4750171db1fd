"""Lowerings that are verified and timed, and the reasons why others are left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cgbundle.errors import CgbundleError

from ...capture.recorder import Recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A recording with one lowering.  `folded`: names of weights whose values became constants of the recording.  `configurations`:
    the text of the file `offline.trace.KERNELS`, "" if the recording was captured."""

    recorded: Recorded = field(repr=False)
    folded: frozenset[str] = frozenset()
    configurations: str = field(default="", repr=False)


def reason(refusal: CgbundleError) -> str:
    """Returns the error's text for the manifest.  The path of a log is removed: the file exists only on the build machine."""
    return LOG.sub("", str(refusal))


LOG = re.compile(r" \(log: [^)]*\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """Candidates by lowering, and for every other lowering the reason why it was left out.  `complete`: no lowering was left out
    because of the time limit."""

    candidates: Mapping[str, Candidate]
    left_out: Mapping[str, str]
    complete: bool
