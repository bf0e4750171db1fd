"""Dynamic batching: requests that come together are answered by one call.  Plain asyncio; serve.py uses it.

A recorded size costs the same however many of its rows are real, so a server waits a moment for more requests before it replays.
Requests are kept apart by length: each goes with others that need the same recorded length, and is padded no further.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Call = Callable[[Sequence[Sequence[int]], int], Sequence[Any]]
"""(rows of tokens, length) -> an answer for each row; no row is longer than `length`."""


class TooLong(Exception):
    """A request is longer than the longest recorded length."""


class Busy(Exception):
    """As many requests wait as may, or the server is about to stop: come back later."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A request that waits: its tokens, since when (seconds of the event loop's clock), and where its answer goes."""

    tokens: Sequence[int]
    since: float
    answer: asyncio.Future[Any]


class Batcher:
    """`async with Batcher(...) as batcher:` ... `await batcher.answer(tokens)`.

    A call is made when `largest` requests of one length wait, or the oldest has waited for `wait` seconds.  Calls run one after the
    other in a thread of their own; what arrives meanwhile waits for the next.  `lengths` are ascending; `calls` and `rows` count
    what was done.
    """

    def __init__(self, call: Call, lengths: Sequence[int], largest: int, wait: float = 0.002, limit: int = 1024) -> None:
        self.calls = self.rows = 0
        self._call, self._lengths, self._largest, self._wait, self._limit = call, lengths, largest, wait, limit
        self._queues: dict[int, deque[Waiting]] = {length: deque() for length in lengths}
        self._arrived = asyncio.Event()
        self._open = False
        self._thread = ThreadPoolExecutor(1, "replay")

    async def __aenter__(self) -> Batcher:
        self._open = True
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Answers what waits, and takes nothing more."""
        self._open = False
        self._arrived.set()
        await self._task
        self._thread.shutdown()

    async def answer(self, tokens: Sequence[int]) -> Any:
        """The answer for one row.  Raises TooLong, Busy, and what the call raises."""
        place = bisect_left(self._lengths, len(tokens))
        if place == len(self._lengths):
            raise TooLong(f"{len(tokens)} tokens, where at most {self._lengths[-1]} were recorded")
        if not self._open:
            raise Busy("the server is stopping")
        if sum(map(len, self._queues.values())) >= self._limit:
            raise Busy(f"{self._limit} requests wait already")
        loop = asyncio.get_running_loop()
        waiting = Waiting(tokens, loop.time(), loop.create_future())
        queue = self._queues[self._lengths[place]]
        queue.append(waiting)
        self._arrived.set()
        try:
            return await waiting.answer
        except asyncio.CancelledError:  # who asked has gone away, and takes no place any more
            with suppress(ValueError):  # its batch is being computed
                queue.remove(waiting)
            raise

    async def _run(self) -> None:
        while (length := await self._next_length()) is not None:
            queue = self._queues[length]
            batch = [queue.popleft() for _ in range(min(self._largest, len(queue)))]
            for waiting, answer in zip(batch, await self._answers([waiting.tokens for waiting in batch], length), strict=True):
                if waiting.answer.done():  # cancelled meanwhile
                    continue
                if isinstance(answer, BaseException):
                    waiting.answer.set_exception(answer)
                else:
                    waiting.answer.set_result(answer)

    async def _answers(self, rows: Sequence[Sequence[int]], length: int) -> list[Any]:
        """An answer or an exception for each row.  A batch that fails is done again row by row: nobody pays for another's row."""
        done = asyncio.get_running_loop().run_in_executor(self._thread, self._call, rows, length)
        await asyncio.wait([done])
        self.calls, self.rows = self.calls + 1, self.rows + len(rows)
        error = done.exception()
        if error is None:
            return list(done.result())
        return [error] if len(rows) == 1 else [each for row in rows for each in await self._answers([row], length)]

    async def _next_length(self) -> int | None:
        """The length whose requests go next: of those that are full or have waited long enough, the one that waits longest.
        None when nothing waits and nothing more will come."""
        loop = asyncio.get_running_loop()
        while True:
            self._arrived.clear()
            now = loop.time()
            due = {length: queue[0].since + self._wait for length, queue in self._queues.items() if queue}
            full = {length for length, queue in self._queues.items() if len(queue) >= self._largest}
            ready = [length for length in due if due[length] <= now or length in full or not self._open]
            if ready:
                return min(ready, key=lambda length: due[length])
            if not self._open:
                return None
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(due.values(), default=None)):
                    await self._arrived.wait()
