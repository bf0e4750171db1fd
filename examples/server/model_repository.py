"""A folder of models, each with versions of its bundle (model_versions.py), looked at again and again.

    models/classifier/1/model.cgb       Triton's layout: <model>/<version>/, and in it a bundle called model.cgb
    models/classifier/2/model.cgb       (a version's folder may be the bundle itself)

To go back, remove the folder of the highest version.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .model_versions import Identity, Model, Options, Version, log
from .request_queue import Batch


class Repository:
    """`async with Repository(folder, ...) as repository:` serves the models of a folder, and looks for new versions every `poll`
    seconds.  `models` are those that have, or had, a version."""

    def __init__(
        self, folder: str | os.PathLike[str], options: Options, poll: float,
        watch: Callable[[str, Version, Batch], None], tell: Callable[[dict[str, Any]], None] = log,
    ) -> None:  # fmt: skip
        self.models: dict[str, Model] = {}
        self._folder, self._options, self._poll, self._watch, self._tell = Path(folder), options, poll, watch, tell
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Repository:
        await self.refresh()
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await asyncio.gather(*[model.close() for model in self.models.values()])

    async def refresh(self) -> None:
        """Looks at the folder now."""
        async with self._turn:
            found = await asyncio.to_thread(scan, self._folder)
            for name in found.keys() - self.models.keys():
                self.models[name] = Model(name, self._options, self._watch)
            await asyncio.gather(*[model.refresh(found.get(name, {}), self._tell) for name, model in self.models.items()])
            for name in [name for name, model in self.models.items() if name not in found and model.current is None]:
                await self.models.pop(name).close()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._poll)
            try:
                await self.refresh()
            except OSError as error:  # a folder far away that does not answer
                self._tell({"event": "unreadable", "why": str(error)})
            except Exception as error:  # noqa: BLE001  as too little memory for a version: the next look is another one
                self._tell({"event": "failed", "why": f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")})


def scan(folder: Path) -> dict[str, dict[int, tuple[Path, Identity]]]:
    """The bundles of a folder of models: {model: {version: (path, identity)}}.  Raises OSError where it cannot be read."""
    found: dict[str, dict[int, tuple[Path, Identity]]] = {}
    for model in sorted(folder.iterdir()):
        if model.name.startswith(".") or not model.is_dir():
            continue
        versions = {}
        for version in model.iterdir():
            if version.name.isascii() and version.name.isdigit() and version.name[0] != "0":
                path = version / "model.cgb" if (version / "model.cgb").is_dir() else version
                with suppress(OSError):  # no bundle there, or not yet: a bundle is whole or absent
                    os.stat(path / "manifest.json")
                    files = [file.stat() for file in sorted(path.rglob("*"))]  # one of them may be repaired in its place
                    versions[int(version.name)] = (path, tuple([(told.st_ino, told.st_size, told.st_mtime_ns) for told in files]))
        if versions:
            found[model.name] = versions
    return found
