"""Copies of a model on several devices, as one: who asks goes to the one that has the least to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from cgbundle import CgbundleError

from ..scheduling.requests import Request
from .adapters import AdapterWeights
from .engine import Engine, Model, State, Stream, Watch


class Engines:
    """An `Engine` for each model, used like one.  All requests of a block go to the same: their pages lie on one device.

    `limit`: requests that may be open on each.  An engine whose call has failed is asked again when others have more to do than it
    has failed, so that a device that fails at once does not draw all requests.
    """

    def __init__(self, models: Sequence[Model], limit: int, watch: Watch) -> None:
        """`models`: of one bundle, at least one."""
        self.limits, self.limit, self.bank = models[0].limits, limit, models[0].bank
        self._each = [Engine(model, limit, watch) for model in models]

    @property
    def state(self) -> State:
        """The sums over all devices."""
        rows = [engine.state for engine in self._each]
        return State(*[sum(numbers) for numbers in zip(*[row.numbers for row in rows], strict=True)])

    @property
    def open_requests(self) -> int:
        """Requests whose blocks are open."""
        return sum(engine.open_requests for engine in self._each)

    @property
    def alive(self) -> bool:
        """Whether every device is served."""
        return all(engine.alive for engine in self._each)

    @property
    def last_error(self) -> CgbundleError | None:
        """Of a call that failed last on one of the devices."""
        return next((engine.last_error for engine in self._each if engine.last_error is not None), None)

    @property
    def adapters(self) -> set[int]:
        """The places of the bank that open requests use."""
        return set().union(*[engine.adapters for engine in self._each])

    async def load_adapter(self, place: int, adapter: AdapterWeights) -> None:
        """Puts an adapter into the bank of every copy.  Raises as `Engine.load_adapter`."""
        await asyncio.gather(*[engine.load_adapter(place, adapter) for engine in self._each])

    async def drain(self) -> None:
        """Takes no more requests, and waits until those that are open have ended."""
        await asyncio.gather(*[engine.drain() for engine in self._each])

    async def __aenter__(self) -> Engines:
        async with AsyncExitStack() as stack:
            for engine in self._each:
                await stack.enter_async_context(engine)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def open(self, requests: Sequence[Request]) -> AsyncIterator[Stream]:
        """Serves some requests on one device.  Raises as `Engine.open`."""
        alive = [engine for engine in self._each if engine.alive] or self._each
        chosen = min(alive, key=lambda engine: engine.open_requests + engine.failures)
        async with chosen.open(requests) as stream:
            yield stream
