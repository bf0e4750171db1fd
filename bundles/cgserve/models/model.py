"""A model with versions of its bundle, of which the highest is served.

A new version is loaded beside the one that serves, in a thread of its own, and examined.  Then it is switched to between two calls:
requests that were taken are answered by the version that took them, which is closed after the last.  One that cannot be loaded, or
whose self-test fails, is refused, and the version before goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from ..log import Tell
from .options import Options, Refused
from .version import Identity, Version, Watch, rounded


class Model:
    """The version that serves is `current`, None before the first; `refused` says why others do not.  `short`: the last one that
    was refused lacked memory."""

    def __init__(self, name: str, options: Options, watch: Watch) -> None:
        self.name, self.refused = name, dict[int, tuple[Identity, Refused]]()
        self.current: Version | None = None
        self.short = False
        self._options, self._watch = options, watch
        self._closing: set[asyncio.Task[None]] = set()

    async def refresh(self, paths: Mapping[int, tuple[Path, Identity]], tell: Tell) -> None:
        """Serves the highest version of `paths` that can be served.  `tell` is told of each load, switch and refusal."""
        self.refused = {number: pair for number, pair in self.refused.items() if number in paths and paths[number][1] == pair[0]}
        for number in sorted(paths, reverse=True):
            path, identity = paths[number]
            if self.current is not None and (self.current.number, self.current.identity) == (number, identity):
                return
            if number in self.refused:
                continue
            version = Version(self.name, number, identity)
            try:
                await version.open(path, self._options, self._watch, self.current)
            except Refused as error:
                self.refused[number], self.short = (identity, error), error.memory
                hint = {"hint": error.hint} if error.hint else {}
                why = {"why": str(error), **hint}
                tell({"event": "refused", "model": self.name, "version": number, **why, **rounded(version.seconds)})
                continue
            entries = {"entries": list(version.entries)} if len(version.entries) + len(version.not_served) > 1 else {}
            left_out = {"not_served": version.not_served} if version.not_served else {}
            fields = {"model": self.name, "version": number, "before": self._switch(version)}
            tell({"event": "serving", **fields, **entries, **left_out, **rounded(version.seconds)})
            return
        if self.current is not None and self.current.number not in paths:
            tell({"event": "gone", "model": self.name, "version": self._switch(None)})

    async def close(self) -> None:
        """Answers what was taken, and closes all versions."""
        self._switch(None)
        while self._closing:
            await asyncio.gather(*self._closing)

    def _switch(self, version: Version | None) -> int | None:
        """From here on `version` takes the requests; the number of the one before, which is closed when its calls are done."""
        before, self.current = self.current, version
        if before is None:
            return None
        task = asyncio.create_task(before.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return before.number
