"""API keys and request ids: ASGI middleware."""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Sequence
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN = ("/health", "/v2/health/live", "/v2/health/ready")
"""Paths that need no key, for health checks."""

LONGEST = 128
"""Maximum characters of a client's request id."""


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Returns the keys of a file, one per line.  Raises ValueError if there is none, OSError if the file cannot be read."""
    keys = tuple([line.strip() for line in path.read_bytes().splitlines() if line.strip()])
    if not keys:
        raise ValueError(f"{path}: no key in it")
    return keys


def has_key(authorization: bytes, keys: Sequence[bytes]) -> bool:
    """Returns whether a header `authorization` is `Bearer` and one of the keys.  Compares all keys, in constant time."""
    kind, _, key = authorization.partition(b" ")
    matches = [hmac.compare_digest(key.strip(), known) for known in keys]
    return kind.lower() == b"bearer" and any(matches)


class KeyRequired:
    """Responds 401 to requests without one of the keys as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[bytes]) -> None:
        self.app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        if has_key(dict(scope["headers"]).get(b"authorization", b""), self._keys):
            await self.app(scope, receive, send)
            return
        error: object = "no valid key: send Authorization: Bearer KEY"
        if scope["path"].startswith("/v1"):
            error = {"message": error, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
        await JSONResponse({"error": error}, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)


class Numbered:
    """Adds the header X-Request-Id to every response: that of the request, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = dict(scope["headers"]).get(b"x-request-id", b"")[:LONGEST]
        number = asked if asked and asked.isascii() else uuid.uuid4().hex.encode()

        async def numbered(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", number)]
            await send(message)

        await self.app(scope, receive, numbered)
