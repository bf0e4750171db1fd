"""A folder of models, each with versions of its bundle, or a single bundle; checked periodically.

    models/classifier/1/model.cgb       Triton's layout: <model>/<version>/ contains a bundle called model.cgb
    models/classifier/2/model.cgb       (a version's folder may be the bundle itself)

To return to an older version, remove the folder of the highest version.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ..log import Tell, one_line
from .model import Model
from .options import Options
from .version import Identity, Version, Watch

Found = dict[str, dict[int, tuple[Path, Identity]]]
"""{model: {version: (path, identity)}}."""


class Repository:
    """`async with Repository(look, ...) as repository:` serves the models that `look` finds, and checks again every `poll` seconds.
    `models`: all models that have a version or still serve one.  `looked`: whether the first check has ended."""

    def __init__(self, look: Callable[[], Found], options: Options, poll: float, watch: Watch, tell: Tell) -> None:
        self.models: dict[str, Model] = {}
        self.looked = False
        self._look_at, self._options, self._poll, self._watch, self._tell = look, options, poll, watch, tell
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Repository:
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await asyncio.gather(*[model.close() for model in self.models.values()])

    def serving(self) -> Iterator[Version]:
        """Returns the versions that serve."""
        # a copy: other threads call this, too
        return (model.current for model in list(self.models.values()) if model.current is not None)

    async def refresh(self) -> None:
        """Checks the files now.  Raises OSError if a folder cannot be read."""
        async with self._turn:
            bundles = await asyncio.to_thread(self._look_at)
            for name in bundles.keys() - self.models.keys():
                self.models[name] = Model(name, self._options, self._watch)
            await asyncio.gather(*[model.refresh(bundles.get(name, {}), self._tell) for name, model in self.models.items()])
            for name in [name for name, model in self.models.items() if name not in bundles and model.current is None]:
                await self.models.pop(name).close()

    async def _look(self) -> None:
        while True:
            try:
                await self.refresh()
            except OSError as error:  # a remote folder that does not respond
                self._tell({"event": "unreadable", "why": str(error)})
            except Exception as error:  # noqa: BLE001  such as too little memory: the next check may succeed
                self._tell({"event": "failed", "why": f"{type(error).__name__}: {one_line(error)}".rstrip(": ")})
            self.looked = True
            await asyncio.sleep(self._poll)


def scan(folder: Path) -> Found:
    """Returns the bundles of a folder of models.  Raises OSError if it cannot be read."""
    bundles: Found = {}
    for model in sorted(folder.iterdir()):
        if model.name.startswith(".") or not model.is_dir():
            continue
        versions = {}
        for version in model.iterdir():
            if version.name.isascii() and version.name.isdigit() and version.name[0] != "0":
                path = version / "model.cgb" if (version / "model.cgb").is_dir() else version
                with suppress(OSError):  # no bundle, or it is not complete yet: bundles are written atomically
                    versions[int(version.name)] = (path, identity_of(path))
        if versions:
            bundles[model.name] = versions
    return bundles


def identity_of(bundle: Path) -> Identity:
    """Identifies a bundle by its files.  Raises OSError if there is no bundle."""
    os.stat(bundle / "manifest.json")
    files = [file.stat() for file in sorted(bundle.rglob("*"))]  # all, because a user may replace a single file
    return tuple([(status.st_ino, status.st_size, status.st_mtime_ns) for status in files])
