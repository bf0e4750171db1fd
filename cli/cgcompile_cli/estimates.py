"""How long a build still takes, by what the stages of the last one took: of the same program, else of any for such a target."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cgcompile.errors import BuildError
from cgcompile.util.content_cache import cache_folder, cache_path, recall, remember

STAGE = "timings"
"""The folder of the content cache."""

EARLY = 0.1
"""The part of a build in which nothing is estimated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """What is kept: the stages of a build, in order, with the seconds that each took."""

    stages: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """`part`: of the build, that is done.  `seconds`: that are left."""

    part: float
    seconds: float


class Estimate:
    """Of one build.  `program` says what is built, `target` what for: both by their `repr`."""

    def __init__(self, program: object, target: object) -> None:
        self._paths: list[Path] = []
        self._known: tuple[tuple[str, float], ...] = ()
        self._done: list[tuple[str, float]] = []
        with suppress(BuildError):  # a build that needs the cache says what is wrong with it
            self._paths = [cache_path(cache_folder(), STAGE, target, *about) for about in ((program,), ())]
            kept = next(filter(None, (recall(path, Timings) for path in self._paths)), None)
            self._known = kept.stages if kept is not None else ()

    def done(self, stage: str, seconds: float) -> None:
        """A stage is done."""
        self._done.append((stage, seconds))

    def left(self, stage: str, seconds: float) -> Left | None:
        """While `stage` has run for `seconds`.  None early in the build, and where nothing is known of such a one."""
        names = [name for name, _ in self._known]
        if stage not in names:
            return None
        at = names.index(stage)
        running = min(seconds, self._known[at][1])
        whole, past = _sum(self._known), _sum(self._known[:at]) + running
        if not past or past < EARLY * whole:
            return None
        pace = (_sum(self._done) + running) / past  # this build's, beside the other's
        return Left(part=past / whole, seconds=(whole - past) * pace)

    def keep(self) -> None:
        """Keeps what the stages took, for the next build."""
        with suppress(BuildError):
            for path in self._paths:
                remember(path, Timings(stages=tuple(self._done)))


def _sum(stages: Sequence[tuple[str, float]]) -> float:
    return sum(seconds for _, seconds in stages)
