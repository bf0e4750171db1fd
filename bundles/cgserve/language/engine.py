"""The threads that plan and make the model's calls, and their interface to asyncio: a stream of tokens."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from cgbundle import CgbundleError

from ..scheduling.requests import Call, Limits, Made, Progress, Request, Step, check
from ..scheduling.scheduler import Scheduler
from .adapters import AdapterWeights, Bank


class Model(Protocol):
    """The model that the engine calls: `bundle_model.BundleModel`, or a substitute in tests."""

    limits: Limits
    bank: Bank | None

    def prepare(self, step: Step) -> Call:
        """Returns a call for a step, which returns the tokens of every lane.  Calling raises CgbundleError."""

    def load_adapter(self, place: int, adapter: AdapterWeights) -> None:
        """Stores an adapter in the bank.  Raises AdapterError, CgbundleError."""


class Busy(Exception):
    """Too many requests are open; retry after `seconds`."""

    def __init__(self, text: str, seconds: int) -> None:
        super().__init__(text)
        self.seconds = seconds


class ModelFailed(Exception):
    """The model failed while it served the request."""


class Stopping(Exception):
    """The engine accepts no more requests: another version serves."""


@dataclass(frozen=True, slots=True)
class State:
    """An engine's state after a step: numbers of requests and of pages of the cache; `preempted` and `shared` as in `Scheduler`."""

    running: int
    waiting: int
    pages_used: int
    pages_free: int
    preempted: int
    shared: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """All fields in order."""
        return self.running, self.waiting, self.pages_used, self.pages_free, self.preempted, self.shared


Queue = asyncio.Queue[tuple[int, Progress] | ModelFailed]


class Stream:
    """`async for index, progress in stream` yields the progress of several requests, until all have ended."""

    def __init__(self, queue: Queue, cancels: Sequence[Callable[[], None]]) -> None:
        """`cancels`: functions that end each request."""
        self._queue, self._cancels = queue, cancels
        self._open = set(range(len(cancels)))

    def cancel(self, index: int) -> None:
        """Ends one request early; the stream yields nothing more for it."""
        self._open.discard(index)
        self._cancels[index]()

    @property
    def behind(self) -> bool:
        """Whether more progress is already available."""
        return not self._queue.empty()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> tuple[int, Progress]:
        """Raises ModelFailed."""
        while self._open:
            update = await self._queue.get()
            if isinstance(update, ModelFailed):
                raise update
            index, progress = update
            if index in self._open:
                if progress.reason is not None:
                    self._open.remove(index)
                return index, progress
        raise StopAsyncIteration


Outcome = Made | BaseException | None
"""The result of a call; None if it was not called because it needed the result of a failed call."""

Watch = Callable[[Step, float], None]
"""Gets every step and its seconds, in the engine's thread."""


class Engine:
    """`async with Engine(...) as engine:` ... `async with engine.open(requests) as stream: async for index, progress in stream:`

    Leaving the block of `open`, for any reason, frees the pages of its requests before the next call.  At most `limit` requests are
    open, running or waiting.
    """

    def __init__(self, model: Model, limit: int, watch: Watch) -> None:
        self.limits, self.limit = model.limits, limit
        self._model, self._watch = model, watch
        self._scheduler = Scheduler(model.limits)
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._calls: SimpleQueue[tuple[Call, bool] | Callable[[], None] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[tuple[Outcome, float]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)  # daemon: a second signal ends the process
        self._numbers = itertools.count()
        self._streams: dict[object, tuple[int, Queue]] = {}  # by key: index of the request in its block, and the block's queue
        self._places: dict[object, int] = {}  # by key: the request's place in the bank
        self._ended, self._pace = 0.0, 1.0  # time of the last end of a request, and average seconds between ends
        self.alive = self._draining = False
        self._empty = asyncio.Event()
        self.failures = 0
        """Failed calls since the last successful one."""
        self.last_error: CgbundleError | None = None
        """The error of the last failed call."""

    @property
    def state(self) -> State:
        """The current state; the thread may change it at any time."""
        sched = self._scheduler
        return State(sched.running, sched.waiting, sched.pages.taken, sched.pages.free, sched.preempted, sched.shared)

    @property
    def open_requests(self) -> int:
        return len(self._streams)

    async def __aenter__(self) -> Engine:
        self._loop = asyncio.get_running_loop()
        self.alive = True
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    @asynccontextmanager
    async def open(self, requests: Sequence[Request]) -> AsyncIterator[Stream]:
        """Serves some requests.

        Raises ValueError for a request that can never be served, Busy, Stopping, and ModelFailed, also while streaming.
        """
        for request in requests:
            check(request, self.limits)
        if not self.alive:
            raise ModelFailed("the engine has ended")
        if self._draining:
            raise Stopping("the model is being closed")
        if len(self._streams) + len(requests) > self.limit:
            text = f"{len(self._streams)} requests are open and {len(requests)} asked for; the limit is {self.limit}"
            raise Busy(text, max(1, round(self._pace)))
        queue: Queue = asyncio.Queue()
        keys = [next(self._numbers) for _ in requests]
        try:
            for index, (key, request) in enumerate(zip(keys, requests, strict=True)):
                self._streams[key], self._places[key] = (index, queue), request.adapter.place
                self._inbox.put(partial(self._scheduler.add, key, request))
            yield Stream(queue, [partial(self._forget, key) for key in keys])
        finally:
            for key in keys:
                self._forget(key)

    @property
    def adapters(self) -> set[int]:
        """The places of the bank that open requests use."""
        return set(self._places.values())

    async def load_adapter(self, place: int, adapter: AdapterWeights) -> None:
        """Stores an adapter in the model's bank, between two calls.  Raises AdapterError, CgbundleError, ModelFailed."""
        if not self.alive:
            raise ModelFailed("the engine has ended")
        done: Future[None] = Future()

        def work() -> None:
            try:
                self._model.load_adapter(place, adapter)
            except BaseException as error:  # noqa: BLE001  the waiting caller raises it
                done.set_exception(error)
            else:
                done.set_result(None)

        self._calls.put(work)
        await asyncio.wrap_future(done)

    async def drain(self) -> None:
        """Accepts no more requests, and waits until open ones have ended."""
        self._draining = True
        while self._streams:
            self._empty.clear()
            await self._empty.wait()

    def _forget(self, key: int) -> None:
        self._places.pop(key, None)
        if self._streams.pop(key, None) is not None:
            self._inbox.put(partial(self._scheduler.cancel, key))
        if not self._streams:
            self._empty.set()

    # --- in the event loop ---------------------------------------------------------------------------------------------

    def _tell(self, updates: Sequence[Progress]) -> None:
        for progress in updates:
            if progress.reason is not None:
                now = self._loop.time()
                self._pace = 0.8 * self._pace + 0.2 * min(60.0, now - self._ended) if self._ended else self._pace
                self._ended = now
            if progress.key in self._streams:
                index, queue = self._streams[progress.key]
                queue.put_nowait((index, progress))

    def _fail(self, keys: Sequence[object], why: str) -> None:
        for key in keys:
            if key in self._streams:
                self._streams[key][1].put_nowait(ModelFailed(why))

    def _end(self) -> None:
        self.alive = False
        self._fail(list(self._streams), "the engine has ended")

    # --- in the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        caller = threading.Thread(target=self._call_all, name="model", daemon=True)
        caller.start()
        under_way = deque[Step]()
        try:
            while self._read_inbox(wait=False):
                step = self._scheduler.next()
                if step is not None:  # prepared while the previous step runs
                    under_way.append(step)
                    self._calls.put((self._model.prepare(step), any([lane.behind >= 0 for lane in step.lanes])))
                elif under_way:
                    self._finish(under_way.popleft(), *self._outcomes.get())
                elif not self._read_inbox(wait=True):
                    return
        finally:  # in any case, so that nobody waits for an answer that will not come
            self._calls.put(None)
            caller.join()
            self._loop.call_soon_threadsafe(self._end)

    def _read_inbox(self, *, wait: bool) -> bool:
        """Calls the functions in the inbox, and with `wait` waits for the first.  Returns False if the engine must end."""
        while wait or not self._inbox.empty():
            action = self._inbox.get()
            if action is None:
                return False
            action()
            wait = False
        return True

    def _finish(self, step: Step, outcome: Outcome, seconds: float) -> None:
        if outcome is None:  # the previous call failed
            self._scheduler.undo()
        elif isinstance(outcome, CgbundleError):  # the requests of this step fail; other requests continue
            self.failures, self.last_error = self.failures + 1, outcome
            self._loop.call_soon_threadsafe(self._fail, self._scheduler.fail(), " ".join(str(outcome).split()))
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            self.failures = 0
            updates = self._scheduler.finish(outcome.rows())
            self._watch(step, seconds)
            if updates:
                self._loop.call_soon_threadsafe(self._tell, updates)

    # --- in the model's thread -------------------------------------------------------------------------------------------

    def _call_all(self) -> None:
        """Makes one call after the other without a pause."""
        outcome: Outcome = None
        while (item := self._calls.get()) is not None:
            if not isinstance(item, tuple):
                item()
                continue
            call, chained = item
            previous, began = outcome if isinstance(outcome, Made) else None, time.perf_counter()
            try:
                outcome = None if chained and previous is None else call(previous)
            except BaseException as error:  # noqa: BLE001  the engine's thread raises it
                outcome = error
            self._outcomes.put((outcome, time.perf_counter() - began))
