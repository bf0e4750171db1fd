"""Batches sequences of tokens: a queue of requests, grouped by the recorded length that each needs.

A request waits briefly for others (request_queue.py says why).  It shares calls with others of the same recorded length, and is
padded only to that length.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import cgbundle
from cgbundle.tensors.tensor import from_bytes

from .request_queue import Batch, Busy, Late, RequestQueue, Stopping
from .spans import Spans

Call = Callable[[Sequence[Sequence[int]], int], Sequence[Any]]
"""(rows of tokens, length) -> an answer for each row; no row is longer than `length`."""

SECONDS = 60.0
"""Deadline of a request."""


class TooLong(Exception):
    """The request is longer than the longest recorded length."""


class Batcher:
    """`async with Batcher(...) as batcher:` ... `await batcher.answer(tokens)`.

    At most `largest` rows share a call; a request waits `wait` seconds for others; at most `limit` requests wait.  `lengths` are
    ascending.  `call` runs in `calls` threads.  Statistics: `calls`, their `rows`, the seconds of calls in `computing`; in `spans`
    the seconds that requests waited in the `queue` and for their `call`.
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
        """Answers the waiting requests, and accepts no more."""
        await self._queue.__aexit__()
        self._threads.shutdown()

    async def answer(self, tokens: Sequence[int]) -> Any:
        """Returns the answer for one row.  Raises TooLong, errors as RequestQueue, and errors of the call."""
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


def sizes_of(program: cgbundle.Program) -> tuple[int, tuple[int, ...]]:
    """Returns (the largest recorded batch, the recorded lengths).  Raises ValueError if the inputs are not token ids and their
    mask, int64 (batch, seq), or if a dimension cannot be padded."""
    dimensions = program.spec.dimensions
    names = tuple(dimension.name for dimension in dimensions)
    if (
        len(names) != 2
        or [(spec.dtype, spec.shape) for spec in program.inputs] != [("int64", names)] * 2
        or len(program.outputs) != 1
    ):
        raise ValueError("expected a bundle of (input_ids, attention_mask) -> one output, int64 (batch, seq)")
    for dimension in dimensions:
        if dimension.pad == "no":
            raise ValueError(f"{dimension.name} cannot be padded: {dimension.reason}")
    return dimensions[0].sizes[-1], dimensions[1].sizes


def calls_of(program: cgbundle.Program, calls: int, spans: Spans) -> Call:
    """Returns a function from rows of tokens to output rows, which `calls` threads may call at once.  The runtime pads to the next
    recorded batch."""
    free = SimpleQueue[cgbundle.Program]()
    for session in [program, *[program.session() for _ in range(calls - 1)]]:
        free.put(session)

    def call(rows: Sequence[Sequence[int]], length: int) -> Sequence[Any]:
        shape, session = (len(rows), length), free.get()
        try:
            with spans.span("tensors", len(rows)):
                ids, mask = array("q"), array("q")
                for row in rows:
                    padding = [0] * (length - len(row))
                    ids.extend([*row, *padding])
                    mask.extend([*[1] * len(row), *padding])
            with spans.span("replay", len(rows)):
                output = session(from_bytes(ids, "int64", shape), from_bytes(mask, "int64", shape))
            with spans.span("rows", len(rows)):
                return output.tolist()
        finally:
            free.put(session)

    return call


def status_of(error: Exception) -> tuple[int, str, int]:
    """Returns the HTTP status for an error of `Batcher.answer`, one line of text, and the seconds until a retry (0: never).  Raises
    unknown errors."""
    match error:
        case TooLong():
            return 413, f"text: {error}", 0
        case Busy():
            return 503, str(error), error.seconds
        case Stopping():
            return 503, "the server is stopping", 1
        case Late():
            return 504, str(error), 0
        case cgbundle.CallError():
            return 422, " ".join(str(error).split()), 0
        case cgbundle.CgbundleError():
            print("serve:", " ".join(str(error).split()), file=sys.stderr)
            return 500, "the model failed; the server's log says why", 0
    raise error
