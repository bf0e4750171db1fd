"""Sequences of tokens that are answered together: a queue of requests, grouped by the recorded length that each needs.

A recorded size costs the same however many of its rows are real, so a server waits a moment for more requests before it replays
(request_queue.py).  Each goes with others that need the same recorded length, and is padded no further.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .request_queue import Batch, RequestQueue
from .spans import Spans

Call = Callable[[Sequence[Sequence[int]], int], Sequence[Any]]
"""(rows of tokens, length) -> an answer for each row; no row is longer than `length`."""

SECONDS = 60.0
"""After these a request is given up."""


class TooLong(Exception):
    """A request is longer than the longest recorded length."""


class Batcher:
    """`async with Batcher(...) as batcher:` ... `await batcher.answer(tokens)`.

    At most `largest` rows go together, and a request waits `wait` seconds for others; `limit` may wait.  `lengths` are ascending.
    `call` runs in `calls` threads.
    What was done: `calls`, the `rows` of all, the seconds that calls were `computing`; in `spans` those that requests waited in the
    `queue` and for their `call`.
    """

    def __init__(
        self, call: Call, lengths: Sequence[int], largest: int, wait: float = 0.002, limit: int = 1024, calls: int = 1,
        spans: Spans | None = None,
    ) -> None:  # fmt: skip
        self.calls = self.rows = 0
        self.computing = 0.0
        self.spans = spans or Spans()
        self._call, self._lengths = call, lengths
        self._threads = ThreadPoolExecutor(calls, "replay")
        self._queue = RequestQueue(self._answers, self._threads, largest, wait, limit, self._count, calls)

    async def __aenter__(self) -> Batcher:
        await self._queue.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Answers what waits, and takes nothing more."""
        await self._queue.__aexit__()
        self._threads.shutdown()

    async def answer(self, tokens: Sequence[int]) -> Any:
        """The answer for one row.  Raises TooLong, as RequestQueue, and what the call raises."""
        if len(tokens) > self._lengths[-1]:
            raise TooLong(f"{len(tokens)} tokens, where at most {self._lengths[-1]} were recorded")
        return await self._queue.answer(tokens, self._length(tokens), 1, SECONDS)

    def _length(self, tokens: Sequence[int]) -> int:
        return self._lengths[bisect_left(self._lengths, len(tokens))]

    def _answers(self, rows: Sequence[Sequence[int]]) -> Sequence[Any]:
        return self._call(rows, self._length(rows[0]))

    def _count(self, batch: Batch) -> None:
        rows = len(batch.rows)
        self.calls, self.rows, self.computing = self.calls + 1, self.rows + rows, self.computing + batch.seconds
        self.spans.add("queue", sum(batch.waited))
        self.spans.add("call", batch.seconds * rows)
