"""A bounded queue of requests with deadlines, which are answered in batches.  An invalid request does not fail others.

A call of a recorded size takes the same time, however many of its rows are padding.  So requests of one group, whose rows can share
a call, wait briefly for each other.  Uses asyncio only.  tensors/entry.py uses it, and token_batches.py for sequences of tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any

Call = Callable[[Sequence[Any]], Sequence[Any]]
"""Items of one group -> an answer for each; runs in the queue's thread."""


class Busy(Exception):
    """The queue is full; retry after `seconds`."""

    def __init__(self, text: str, seconds: int) -> None:
        super().__init__(text)
        self.seconds = seconds


class Stopping(Exception):
    """The queue takes no more requests."""


class Late(Exception):
    """The request's deadline has passed."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A waiting request: its item and number of rows, its arrival and deadline (seconds of the event loop's clock), the future of
    its answer, and the context variables of its caller."""

    item: Any
    rows: int
    since: float
    until: float
    answer: asyncio.Future[Any]
    context: Context


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one call: the rows of each request, the seconds that it waited, the seconds of the call, and the context of
    each request.  `failed`: the call raised; several requests are then retried one by one."""

    rows: tuple[int, ...]
    waited: tuple[float, ...]
    seconds: float
    contexts: tuple[Context, ...]
    failed: bool = False


class RequestQueue:
    """`async with RequestQueue(...) as queue:` ... `await queue.answer(item, group, rows, seconds)`.

    Makes a call when `largest` rows of one group wait, or the oldest request has waited `wait` seconds.  A request with more rows
    is called alone.  At most `calls` calls run at once in `thread`, and at most `limit` requests wait.  `watch` gets every batch.
    Leaving the block answers the waiting requests and accepts no more.
    """

    def __init__(
        self, call: Call, thread: ThreadPoolExecutor, largest: int, wait: float, limit: int, watch: Callable[[Batch], None],
        calls: int = 1,
    ) -> None:  # fmt: skip
        self._call, self._thread, self._largest, self._wait, self._limit, self._watch = call, thread, largest, wait, limit, watch
        self._calls = calls
        self._queues: dict[Hashable, deque[Waiting]] = {}
        self._arrived = asyncio.Event()
        self._open = False
        self._count = self._rows = 0  # waiting requests and their rows
        self._pace = 0.0  # moving average of a call's seconds

    @property
    def waiting(self) -> int:
        return self._count

    def pause(self, calls: int) -> int:
        """Estimates the seconds for all waiting requests and `calls` more calls; at least 1."""
        waiting_calls = max(len(self._queues), math.ceil(self._rows / self._largest))
        return max(1, math.ceil((waiting_calls + calls) * self._pace / self._calls))

    async def __aenter__(self) -> RequestQueue:
        self._open = True
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        self._arrived.set()
        await self._task

    async def answer(self, item: Any, group: Hashable, rows: int, seconds: float) -> Any:
        """Returns the answer for an item of `rows` rows, within `seconds`.  Raises Busy, Stopping, Late, and errors of the call."""
        if not self._open:
            raise Stopping("the model is being closed")
        if self._count >= self._limit:
            raise Busy(f"{self._limit} requests wait already", self.pause(0))
        loop = asyncio.get_running_loop()
        now = loop.time()
        waiting = Waiting(item, rows, now, now + seconds, loop.create_future(), copy_context())
        queue = self._queues.setdefault(group, deque())
        queue.append(waiting)
        self._count, self._rows = self._count + 1, self._rows + rows
        self._arrived.set()
        try:
            async with asyncio.timeout_at(waiting.until):
                return await waiting.answer
        except TimeoutError:
            self._forget(group, waiting)
            raise Late(f"no answer within {seconds:g} s") from None
        except asyncio.CancelledError:  # the client disconnected
            self._forget(group, waiting)
            raise

    def _forget(self, group: Hashable, waiting: Waiting) -> None:
        queue = self._queues.get(group, deque())
        with suppress(ValueError):  # its call runs, so the request has left the queue
            queue.remove(waiting)
            self._count, self._rows = self._count - 1, self._rows - waiting.rows
        if not queue:
            self._queues.pop(group, None)

    async def _run(self) -> None:
        free = asyncio.Semaphore(self._calls)
        async with asyncio.TaskGroup() as calls:
            while await free.acquire() and (group := await self._next_group()) is not None:
                calls.create_task(self._serve(self._take(group), free))

    async def _serve(self, batch: Sequence[Waiting], free: asyncio.Semaphore) -> None:
        """Makes one call, then frees its place."""
        for waiting, answer in zip(batch, await self._answers(batch), strict=True):
            if waiting.answer.done():  # late, or disconnected
                continue
            if isinstance(answer, BaseException):
                waiting.answer.set_exception(answer)
            else:
                waiting.answer.set_result(answer)
        free.release()

    def _take(self, group: Hashable) -> list[Waiting]:
        """Takes the next requests of a group whose rows fit into one call: at least one."""
        queue, batch, rows = self._queues[group], list[Waiting](), 0
        while queue and (not batch or rows + queue[0].rows <= self._largest):
            batch.append(queue.popleft())
            rows += batch[-1].rows
        if not queue:
            del self._queues[group]
        self._count, self._rows = self._count - len(batch), self._rows - rows
        return batch

    async def _answers(self, batch: Sequence[Waiting]) -> list[Any]:
        """Returns an answer or an exception for each request.  Retries a failed batch one by one: an invalid request fails
        alone."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        future = loop.run_in_executor(self._thread, self._call, [waiting.item for waiting in batch])
        await asyncio.wait([future])
        seconds = loop.time() - began
        self._pace = seconds if not self._pace else 0.8 * self._pace + 0.2 * seconds
        rows, contexts = tuple([waiting.rows for waiting in batch]), tuple([waiting.context for waiting in batch])
        error = future.exception()
        self._watch(Batch(rows, tuple([began - waiting.since for waiting in batch]), seconds, contexts, failed=error is not None))
        if error is None:
            return list(future.result())
        return [error] if len(batch) == 1 else [answer for failed in batch for answer in await self._answers([failed])]

    async def _next_group(self) -> Hashable | None:
        """Waits for groups that are full or due, and returns the group with the oldest request.  Returns None when the queue is
        closed and empty."""
        loop = asyncio.get_running_loop()
        while True:
            self._arrived.clear()
            now = loop.time()
            due = {group: queue[0].since + self._wait for group, queue in self._queues.items()}
            full = {group for group, queue in self._queues.items() if sum(waiting.rows for waiting in queue) >= self._largest}
            ready = [group for group in due if due[group] <= now or group in full or not self._open]
            if ready:
                return min(ready, key=lambda group: due[group])
            if not self._open:
                return None
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(due.values(), default=None)):
                    await self._arrived.wait()
