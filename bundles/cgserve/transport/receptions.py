"""Limits concurrent receptions of gRPC messages.  gRPC holds incomplete messages in memory, and does not report their length."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable

QUICK, SLOW = 1, 4
"""Maximum concurrent receptions: in the first `PATIENCE` seconds of a message, and later."""

PATIENCE, LONGEST = 1.0, 30.0
"""Seconds until a message counts as slow, and until its reception fails."""


LARGE, SOON = 1 << 20, 0.2
"""After a message of at least `LARGE` bytes, freed memory is returned to the system `SOON` seconds later."""


class Crowded(Exception):
    """A message is not received; the text says why."""


class Receptions:
    """Receives few messages at once.  Other messages stay at the client, except for the bytes of HTTP/2's flow control window."""

    def __init__(self, quick: int = QUICK, slow: int = SLOW, patience: float = PATIENCE) -> None:
        self._turns, self._places, self._patience = asyncio.Semaphore(quick), slow, patience
        self._giving_back: asyncio.Task[None] | None = None

    async def receive(self, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Returns the result of `read`.  Raises Crowded."""
        data = await self._receive(read)
        if isinstance(data, bytes) and len(data) >= LARGE and (self._giving_back is None or self._giving_back.done()):
            self._giving_back = asyncio.create_task(give_back_memory())
        return data

    async def _receive(self, read: Callable[[], Awaitable[bytes]]) -> bytes:
        reading: asyncio.Future[bytes] | None = None
        try:
            async with self._turns:
                reading = asyncio.ensure_future(read())
                await asyncio.wait([reading], timeout=self._patience)
            if reading.done():
                return reading.result()
            if not self._places:
                raise Crowded("too many messages arrive slowly: ask again")
            self._places -= 1
            try:
                async with asyncio.timeout(LONGEST):
                    return await reading
            except TimeoutError:
                raise Crowded(f"the message did not arrive within {LONGEST:g} s") from None
            finally:
                self._places += 1
        finally:
            if reading is not None:
                reading.cancel()


async def give_back_memory() -> None:
    """Returns freed memory to the system.  The C library keeps the buffers in which gRPC receives: 30 MB for a message of 60 MB."""
    await asyncio.sleep(SOON)
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # only glibc has it
        await asyncio.to_thread(library.malloc_trim, 0)
