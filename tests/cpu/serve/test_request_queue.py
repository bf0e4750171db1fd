"""bundles/cgserve/batching/request_queue.py: which requests are called together, wait, or are refused."""

from __future__ import annotations

import asyncio
import importlib
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def requests() -> ModuleType:
    """Imports the module if its requirements are installed."""
    return importlib.import_module("cgserve.batching.request_queue")


class Model:
    """Doubles numbers and records its batches. Raises an error for 13. Waits for `gate` if there is one."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.called: list[list[int]] = []
        self.gate = gate

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.called.append(list(items))
        if self.gate is not None:
            assert self.gate.wait(60)
        if 13 in items:
            raise ValueError("bad luck")
        return [2 * item for item in items]


def asked(requests: ModuleType, model: Model, session: Callable[[Any], Awaitable[Any]], **options: Any) -> Any:
    """Returns the result of `session(queue)`, with batches of at most 4 rows. If `session` has an attribute `batches`, they are
    recorded there."""

    async def run() -> Any:
        arguments = {"wait": 0.01, "limit": 100, "watch": lambda batch: None} | options
        with ThreadPoolExecutor(1) as thread:
            async with requests.RequestQueue(model, thread, 4, **arguments) as queue:
                return await asyncio.wait_for(session(queue), 60)

    return asyncio.run(run())


def test_rows_of_one_group_go_together_up_to_the_largest(requests: ModuleType) -> None:
    batches: list[Any] = []
    model = Model()
    items = [(1, "a", 2), (2, "b", 1), (3, "a", 1), (4, "a", 2), (5, "b", 9)]

    async def session(queue: Any) -> list[int]:
        return list(await asyncio.gather(*[queue.answer(item, group, rows, 10) for item, group, rows in items]))

    assert asked(requests, model, session, watch=batches.append) == [2, 4, 6, 8, 10]
    assert sorted(model.called) == [[1, 3], [2], [4], [5]], "4 would make 5 rows of 4, and 5 has 9 of its own"
    assert sorted(batch.rows for batch in batches) == [(1,), (2,), (2, 1), (9,)]
    assert all(len(batch.waited) == len(batch.rows) and batch.seconds >= 0 and not batch.failed for batch in batches)


def test_several_calls_at_once(requests: ModuleType) -> None:
    """Two calls run. The third one starts when one of them ends; until then its requests stay in the queue."""
    gate, began = threading.Event(), threading.Semaphore(0)

    def call(items: Sequence[int]) -> list[int]:
        began.release()
        assert gate.wait(60)
        return [2 * item for item in items]

    async def run() -> tuple[int, list[int]]:
        with ThreadPoolExecutor(3) as threads:
            async with requests.RequestQueue(call, threads, 4, 0.01, 100, lambda batch: None, 2) as queue:
                tasks = [asyncio.create_task(queue.answer(number, "a", 4, 20)) for number in range(5)]
                for _ in range(2):
                    assert await asyncio.to_thread(began.acquire, timeout=60)
                await asyncio.sleep(0.05)
                waiting = queue.waiting
                gate.set()
                return waiting, [await one for one in tasks]

    assert asyncio.run(run()) == (3, [0, 2, 4, 6, 8])


def test_a_full_queue_refuses_and_says_when_to_come_back(requests: ModuleType) -> None:
    gate = threading.Event()

    async def session(queue: Any) -> Any:
        first = asyncio.create_task(queue.answer(0, "a", 4, 20))
        while queue.waiting or not model.called:
            await asyncio.sleep(0.005)
        waiting = [asyncio.create_task(queue.answer(n, "a", 4, 20)) for n in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(requests.Busy, match="2 requests wait already") as caught:
            await queue.answer(3, "a", 1, 20)
        assert caught.value.seconds >= 1
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        late = asyncio.create_task(queue.answer(4, "a", 1, 20))  # one request has left, so there is room again
        await asyncio.sleep(0)
        gate.set()
        return [await task for task in (first, waiting[1], late)]

    model = Model(gate)
    assert asked(requests, model, session, limit=2) == [0, 4, 8]
    assert [1] not in model.called, "what nobody waits for is not computed"


def test_a_deadline_that_passes_is_told_and_takes_no_place(requests: ModuleType) -> None:
    gate = threading.Event()

    async def session(queue: Any) -> None:
        first = asyncio.create_task(queue.answer(0, "a", 4, 20))
        while not model.called:
            await asyncio.sleep(0.005)
        began = time.monotonic()
        with pytest.raises(requests.Late, match=r"no answer within 0.05 s"):
            await queue.answer(1, "a", 1, 0.05)
        assert time.monotonic() - began < 60 and queue.waiting == 0
        gate.set()
        assert await first == 0
        assert await queue.answer(2, "a", 1, 20) == 4

    model = Model(gate)
    asked(requests, model, session)
    assert model.called == [[0], [2]]


def test_a_request_that_fails_fails_alone(requests: ModuleType) -> None:
    async def session(queue: Any) -> list[Any]:
        return list(await asyncio.gather(*[queue.answer(n, "a", 1, 20) for n in (1, 13, 3)], return_exceptions=True))

    batches: list[Any] = []
    answers = asked(requests, Model(), session, watch=batches.append)
    assert [str(answer) for answer in answers] == ["2", "bad luck", "6"]
    assert sum(sum(batch.rows) for batch in batches if not batch.failed) == 2, "rows are counted once, and where there is an answer"


def test_the_end_answers_what_waits_and_takes_nothing_more(requests: ModuleType) -> None:
    async def run() -> Any:
        with ThreadPoolExecutor(1) as thread:
            async with requests.RequestQueue(Model(), thread, 4, 3600, 100, lambda batch: None) as queue:
                waiting = [asyncio.create_task(queue.answer(n, n, 1, 20)) for n in range(3)]
                await asyncio.sleep(0)
            with pytest.raises(requests.Stopping):
                await queue.answer(1, "a", 1, 20)
            return await asyncio.wait_for(asyncio.gather(*waiting), 60)

    assert asyncio.run(run()) == [0, 2, 4]


def test_every_request_gets_its_own_answer(requests: ModuleType) -> None:
    """300 requests with random groups and rows at random times, some of which are cancelled."""
    draw, model, batches = random.Random(0), Model(), list[Any]()

    async def later(queue: Any, item: int) -> int:
        await asyncio.sleep(draw.random() / 5)
        asking = asyncio.create_task(queue.answer(item, item % 3, draw.randrange(1, 5), 20))
        if draw.random() < 0.1:
            await asyncio.sleep(0.001)
            asking.cancel()
        await asyncio.wait([asking])
        return item if asking.cancelled() else asking.result() // 2

    async def session(queue: Any) -> list[int]:
        return list(await asyncio.gather(*[later(queue, item) for item in range(100, 400)]))

    assert asked(requests, model, session, watch=batches.append) == list(range(100, 400))
    assert all(len({item % 3 for item in items}) == 1 for items in model.called)
    assert all(sum(batch.rows) <= 4 for batch in batches) and len(model.called) < 300
