"""Loads models of a folder on demand, and closes them when other models need their memory.

ray_replicas.py uses it, one per replica.  The folder has the layout of model_repository.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from ..log import Tell, json_log
from .model import Model
from .model_repository import scan
from .options import Options, Refused
from .version import Identity, Version, Watch


class BundleCache:
    """Keeps at most `limit` bytes of loaded bundles, as their manifests say, and evicts the least recently used.  Checks the folder
    every `poll` seconds while requests arrive.

    A model evicts other models only after it was loaded and tested, or if it was refused for lack of memory.  The error of a
    refused model is kept until its files change."""

    def __init__(self, folder: str | Path, limit: int, options: Options, poll: float, tell: Tell = json_log) -> None:
        self._folder, self._limit, self._options, self._poll, self._tell = Path(folder), limit, options, poll, tell
        self._models: OrderedDict[str, Model] = OrderedDict()  # least recently used first
        self._turn = asyncio.Lock()
        self._looked = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: dict[str, tuple[dict[int, tuple[Path, Identity]], str]] = {}

    @property
    def loaded(self) -> dict[str, int]:
        """The loaded models and their versions, least recently used first."""
        return {name: model.current.number for name, model in self._models.items() if model.current is not None}

    @property
    def failure(self) -> Exception | None:
        """The error after which this process cannot use its GPU, or None."""
        failures = [model.current.failure for model in self._models.values() if model.current is not None]
        return next((failure for failure in failures if failure is not None), None)

    async def version(self, name: str) -> Version:
        """Returns the version of a model that serves, and loads it if necessary.  The version stays open until the caller's next
        `await`.  Raises KeyError for an unknown model, Refused if none of its versions can be served."""
        if name not in self._models:
            async with self._turn:
                if name not in self._models:  # another task may have loaded it during the wait
                    await self._open(name)
        elif time.monotonic() - self._looked > self._poll:
            self._looked = time.monotonic()
            self._later(self._refresh())
        model = self._models.get(name)
        if model is None or model.current is None:  # it was closed during the wait
            return await self.version(name)
        self._models.move_to_end(name)
        return model.current

    async def close(self) -> None:
        """Answers accepted requests, and closes all models."""
        async with self._turn:
            models = [self._models.popitem()[1] for _ in range(len(self._models))]
        await asyncio.gather(*[model.close() for model in models], *self._tasks)

    async def _open(self, name: str) -> None:
        versions = (await asyncio.to_thread(scan, self._folder))[name]
        if name in self._failed and self._failed[name][0] == versions:
            raise Refused(self._failed[name][1])
        self._failed.pop(name, None)
        model = Model(name, self._options, Watch())
        await model.refresh(versions, self._tell)
        while model.current is None and model.short and self._models:
            await self._evict(name)
            model = Model(name, self._options, Watch())
            await model.refresh(versions, self._tell)
        if model.current is None:
            _, why = model.refused[max(model.refused)]
            text = f"no version of {name!r} can be served: {why}"
            if not model.short:
                self._failed[name] = versions, text
            raise Refused(text)
        needed = sum(model.current.memory.values())
        while self._models and needed + self._bytes() > self._limit:
            await self._evict(name)
        self._models[name] = model

    async def _evict(self, name: str) -> None:
        oldest, model = self._models.popitem(last=False)
        self._tell({"event": "evicted", "model": oldest, "for": name})
        await model.close()

    def _bytes(self) -> int:
        return sum(sum(model.current.memory.values()) for model in self._models.values() if model.current is not None)

    async def _refresh(self) -> None:
        async with self._turn:
            bundles = await asyncio.to_thread(scan, self._folder)
            for name, model in list(self._models.items()):
                await model.refresh(bundles.get(name, {}), self._tell)
                if model.current is None:
                    del self._models[name]
                    await model.close()

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
