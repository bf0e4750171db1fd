"""Limits for clients of an HTTP server: how much they send and how long they take.  Also detects that they disconnect.

uvicorn closes idle connections, shuts down gracefully, and limits the size of headers.  This module adds the other limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import h11
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

AT_ONCE = 16 << 10
"""Maximum bytes per read of a connection.  asyncio reads 256 KiB, which adds up for many bodies."""


class Held:
    """The bytes of a connection's body in memory."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class BoundedBodies:
    """ASGI middleware.  A body of more than `largest` bytes gets status 413: before it is read if its length is declared, else as
    soon as it is too long.  All connections together hold at most `together` bytes of bodies, until they are answered; beyond that
    the status is 503.  If the client disconnects before the answer, the work is cancelled.  `form` makes the response's body from
    an error text."""

    def __init__(
        self, app: ASGIApp, largest: int, form: Callable[[str], object] = lambda text: {"detail": text}, together: int | None = None
    ) -> None:  # fmt: skip
        self.app, self.largest, self.form = app, largest, form
        self._left = max(largest, together or 4 * largest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        held = Held()
        try:
            body = await self._body(scope, receive, held)
            if isinstance(body, JSONResponse):
                await body(scope, receive, send)
            else:
                await self._answer(body, scope, receive, send)
        except ClientDisconnect:
            return
        finally:
            self._left += held.bytes

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        unread = [body]

        async def receive_body() -> Message:
            if not unread:
                await anyio.sleep_forever()  # the next message is the disconnect, which `watch` receives
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        answering, gone = asyncio.current_task(), False
        assert answering is not None

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            answering.cancel()

        watching = asyncio.create_task(watch())  # an anyio task group takes three times as long as a task
        try:
            await self.app(scope, receive_body, send)
        except asyncio.CancelledError:
            if not gone or answering.uncancel():  # not only `watch` cancelled this task
                raise
        finally:
            watching.cancel()

    async def _body(self, scope: Scope, receive: Receive, held: Held) -> bytes | JSONResponse:
        """Returns the whole body, or the response if the body is refused.  Raises ClientDisconnect."""
        declared = int(next((value for name, value in scope["headers"] if name == b"content-length"), b"0"))  # h11 checks it
        parts, more = list[bytes](), True
        while True:
            if max(declared, held.bytes) > self.largest:
                return JSONResponse(self.form(f"body: more than {self.largest} bytes"), 413)
            if self._left < 0 or declared - held.bytes > self._left:
                text = "body: all requests together exceed the limit of bytes; retry later"
                return JSONResponse(self.form(text), 503, {"Retry-After": "1"})
            if not more:
                return b"".join(parts)
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            held.bytes += len(parts[-1])
            self._left -= len(parts[-1])
            more = message.get("more_body", False)


class BoundedConnection(H11Protocol):
    """uvicorn's connection with a time limit: it is closed if a request is not complete `seconds` after the connection or the
    request began, or if a response is not received in that time.  Reads uvicorn's `conn`, `flow` and `timeout_keep_alive_task`
    (0.30 to 0.54)."""

    def __init__(self, *arguments: Any, seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seconds = seconds
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if hasattr(transport, "max_size"):
            transport.max_size = AT_ONCE
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Starts the timer while the server waits for the client, and stops it otherwise.  uvicorn has its own timer for idle
        connections.  A closing connection waits until the client has read everything."""
        idle = self.timeout_keep_alive_task is not None
        asking = self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not idle
        if not (asking or self.flow.write_paused or self.transport.is_closing()):
            if self._end is not None:
                self._end.cancel()
            self._end = None
        elif self._end is None:
            self._end = self.loop.call_later(self._seconds, self.transport.abort)
