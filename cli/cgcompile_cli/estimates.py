"""Estimates the remaining time of a build from the stage times of an earlier build: of the same program, or else for the same
target."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cgcompile.errors import BuildError
from cgcompile.util.content_cache import cache_folder, cache_path, recall, remember

STAGE = "timings"
"""The folder in the content cache."""

EARLY = 0.1
"""No estimate is made before this fraction of a build."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """The stages of a build in order, with their seconds."""

    stages: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """An estimate.  `part`: the finished fraction of the build.  `seconds`: the remaining time."""

    part: float
    seconds: float


class Estimate:
    """Estimates one build.  `program` and `target` identify it by their `repr`."""

    def __init__(self, program: object, target: object) -> None:
        self._paths: list[Path] = []
        self._earlier: tuple[tuple[str, float], ...] = ()
        self._done: list[tuple[str, float]] = []
        self._cached = False
        with suppress(BuildError):  # a build that needs the cache reports its errors itself
            self._paths = [cache_path(cache_folder(), STAGE, target, *identity) for identity in ((program,), ())]
            record = next(filter(None, (recall(path, Timings) for path in self._paths)), None)
            self._earlier = record.stages if record is not None else ()

    def done(self, stage: str, seconds: float, cached: bool = False) -> None:
        """Records a finished stage.  `cached`: the stage took its result from the cache."""
        self._done.append((stage, seconds))
        self._cached = self._cached or cached

    def left(self, stage: str, seconds: float) -> Left | None:
        """Estimates the remaining time after `seconds` of `stage`.  Returns None early in the build, or without earlier times."""
        names = [name for name, _ in self._earlier]
        if stage not in names:
            return None
        index = names.index(stage)
        running = min(seconds, self._earlier[index][1])
        total, past = _sum(self._earlier), _sum(self._earlier[:index]) + running
        if not past or past < EARLY * total:
            return None
        ratio = (_sum(self._done) + running) / past  # time of this build / time of the earlier build
        return Left(part=past / total, seconds=(total - past) * ratio)

    def keep(self) -> None:
        """Stores the stage times for the next build.  Does nothing after a cached stage: the next model may not be in the cache."""
        with suppress(BuildError):
            for path in () if self._cached else self._paths:
                remember(path, Timings(stages=tuple(self._done)))


def _sum(stages: Sequence[tuple[str, float]]) -> float:
    return sum(seconds for _, seconds in stages)
