"""A model with versions of its bundle; the highest version serves.

A new version is loaded and tested in its own thread while the old one serves.  The switch happens between two calls: the old
version answers the requests that it accepted, and is then closed.  A version that cannot be loaded, or fails its self-test, is
refused, and the old version continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from ..log import Tell
from .options import Options, Refused
from .version import Identity, Version, Watch, rounded


class Model:
    """`current`: the version that serves, or None; `refused`: by version, why it is refused.  `short`: whether the last refused
    version lacked memory."""

    def __init__(self, name: str, options: Options, watch: Watch) -> None:
        self.name, self.refused = name, dict[int, tuple[Identity, Refused]]()
        self.current: Version | None = None
        self.short = False
        self._options, self._watch = options, watch
        self._closing: set[asyncio.Task[None]] = set()

    async def refresh(self, paths: Mapping[int, tuple[Path, Identity]], tell: Tell) -> None:
        """Serves the highest version of `paths` that can be served.  `tell` logs each load, switch and refusal."""
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
        """Answers accepted requests, and closes all versions."""
        self._switch(None)
        while self._closing:
            await asyncio.gather(*self._closing)

    def _switch(self, version: Version | None) -> int | None:
        """Makes `version` the current one, closes the previous one after its calls, and returns the previous number."""
        previous, self.current = self.current, version
        if previous is None:
            return None
        task = asyncio.create_task(previous.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return previous.number
