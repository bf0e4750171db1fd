"""bundles/cgserve/transport/receptions.py: how many gRPC messages are received at once."""

from __future__ import annotations

import asyncio
import importlib
from types import ModuleType

import pytest


@pytest.fixture
def receptions() -> ModuleType:
    return importlib.import_module("cgserve.transport.receptions")


class Sender:
    """Messages that end when `arrived` is set."""

    def __init__(self) -> None:
        self.arrived, self.reading, self.most, self.left = asyncio.Event(), 0, 0, 0

    async def __call__(self) -> bytes:
        self.reading += 1
        self.most = max(self.most, self.reading)
        try:
            await self.arrived.wait()
            await asyncio.sleep(0.001)
            return b"message"
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.reading -= 1


def test_few_messages_are_received_at_once(receptions: ModuleType) -> None:
    async def run() -> None:
        sender, turns = Sender(), receptions.Receptions(2, 4, 60.0)
        asking = [asyncio.create_task(turns.receive(sender)) for _ in range(50)]
        await asyncio.sleep(0.01)
        assert sender.reading == 2
        sender.arrived.set()
        assert await asyncio.gather(*asking) == [b"message"] * 50 and sender.most == 2

    asyncio.run(run())


def test_slow_messages_make_room_for_others(receptions: ModuleType) -> None:
    """Three slow messages continue beside other ones, and the fourth is given up. When they end, there is room again."""

    async def run() -> None:
        slow, quick, turns = Sender(), Sender(), receptions.Receptions(2, 3, 0.05)
        quick.arrived.set()
        asking = [asyncio.create_task(turns.receive(slow)) for _ in range(4)]
        await asyncio.sleep(0)
        assert await turns.receive(quick) == b"message"
        done, waiting = await asyncio.wait(asking, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = done
        assert isinstance(refused.exception(), receptions.Crowded) and len(waiting) == 3
        await asyncio.sleep(0)
        assert (slow.left, slow.reading) == (1, 3)
        slow.arrived.set()
        assert await asyncio.gather(*waiting) == [b"message"] * 3
        assert turns._places == 3 and await turns.receive(slow) == b"message"

    asyncio.run(run())


def test_a_client_that_leaves_is_not_read(receptions: ModuleType) -> None:
    async def run() -> None:
        sender, turns = Sender(), receptions.Receptions(1, 0, 60.0)
        first, second = [asyncio.create_task(turns.receive(sender)) for _ in range(2)]
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.01)
        assert first.cancelled() and sender.left == 1 and sender.reading == 1
        sender.arrived.set()
        assert await second == b"message"

    asyncio.run(run())


def test_memory_is_given_back_after_large_messages(receptions: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    releases = list[int]()

    async def give_back() -> None:
        releases.append(1)
        await asyncio.sleep(0.01)

    monkeypatch.setattr(receptions, "give_back_memory", give_back)

    async def run() -> None:
        turns = receptions.Receptions()

        async def large() -> bytes:
            return bytes(receptions.LARGE)

        async def small() -> bytes:
            return b"small"

        await turns.receive(small)
        assert not releases
        for _ in range(3):
            await turns.receive(large)
        await asyncio.sleep(0.02)
        assert releases == [1], "one at a time"
        await turns.receive(large)
        await asyncio.sleep(0)
        assert releases == [1, 1]

    asyncio.run(run())
