"""A repository for `cgserve` with one language model and no bundle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Loaded:
    """The part of a repository that `Application` uses; `served` is a `ServedModel`."""

    looked = True

    def __init__(self, served: Any) -> None:
        self._engine = served.engine
        self._version = SimpleNamespace(
            model=served.name,
            number=1,
            language=served,
            text=None,
            failure=None,
            entries={},
            memory={},
            seconds={},
            names=(served.name,),
        )
        self.models = {served.name: SimpleNamespace(current=self._version, refused={})}

    async def __aenter__(self) -> None:
        await self._engine.__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await self._engine.__aexit__()

    def serving(self) -> list[Any]:
        """Returns the only version."""
        return [self._version]
