"""Copies of a model on several devices, used as one: a new request goes to the least busy copy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from cgbundle import CgbundleError

from ..scheduling.requests import Request
from .adapters import AdapterWeights
from .engine import Engine, Model, State, Stream, Watch


class Engines:
    """Has an `Engine` for each model, and the interface of an `Engine`.  All requests of one `open` block go to one engine, because
    pages are on one device.

    `limit`: maximum open requests of each engine.  Failed calls count as open requests: a device that fails fast must not get all
    requests.
    """

    def __init__(self, models: Sequence[Model], limit: int, watch: Watch) -> None:
        """`models`: copies of one bundle, at least one."""
        self.limits, self.limit, self.bank = models[0].limits, limit, models[0].bank
        self._engines = [Engine(model, limit, watch) for model in models]

    @property
    def state(self) -> State:
        """The sums over all devices."""
        rows = [engine.state for engine in self._engines]
        return State(*[sum(numbers) for numbers in zip(*[row.numbers for row in rows], strict=True)])

    @property
    def open_requests(self) -> int:
        return sum(engine.open_requests for engine in self._engines)

    @property
    def alive(self) -> bool:
        """Whether all engines run."""
        return all(engine.alive for engine in self._engines)

    @property
    def last_error(self) -> CgbundleError | None:
        """The error of a failed call on one of the devices, or None."""
        return next((engine.last_error for engine in self._engines if engine.last_error is not None), None)

    @property
    def adapters(self) -> set[int]:
        """The places of the bank that open requests use."""
        return set().union(*[engine.adapters for engine in self._engines])

    async def load_adapter(self, place: int, adapter: AdapterWeights) -> None:
        """Stores an adapter in the bank of every copy.  Raises as `Engine.load_adapter`."""
        await asyncio.gather(*[engine.load_adapter(place, adapter) for engine in self._engines])

    async def drain(self) -> None:
        """Accepts no more requests, and waits until open ones have ended."""
        await asyncio.gather(*[engine.drain() for engine in self._engines])

    async def __aenter__(self) -> Engines:
        async with AsyncExitStack() as stack:
            for engine in self._engines:
                await stack.enter_async_context(engine)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def open(self, requests: Sequence[Request]) -> AsyncIterator[Stream]:
        """Serves some requests on one device.  Raises as `Engine.open`."""
        alive = [engine for engine in self._engines if engine.alive] or self._engines
        chosen = min(alive, key=lambda engine: engine.open_requests + engine.failures)
        async with chosen.open(requests) as stream:
            yield stream
