"""uvicorn around an application: a socket that listens before the server begins, limits of connections, and a quiet end."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from .limits import BoundedConnection

SWITCH = 1e-4
"""Seconds after which a thread that computes gives the interpreter to one that waits.  The event loop waits at every read of a
socket: by Python's 5 ms, fifty bodies that come at once kept it from everything else for a second.  What calls a model waits, too:
beside a thread that never waits, one that calls six functions of a driver lost 31 ms with 5 ms, and 1.6 with this."""

REQUEST, IDLE, STOPPING = 30.0, 5, 60
"""Seconds that a connection has for a whole request, or to take an answer; between two requests; and at the server's end."""


class PortTaken(Exception):
    """Nothing can listen there; the text says why."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one.  Raises PortTaken."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise PortTaken(f"{host}:{port}: {str(error.strerror).partition(' (')[0]}") from None
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it for sockets of its own only: 40 ms an answer
    return listening


def url_of(listening: socket.socket, scheme: str = "http") -> str:
    """Where a socket listens."""
    host, port = listening.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def make_server(
    app: ASGIApp, *, request: float = REQUEST, idle: int = IDLE, stopping: int = STOPPING, **more: Any
) -> uvicorn.Server:
    """The server around an application; times in seconds.  `more`: options of uvicorn, such as certificates."""
    sys.setswitchinterval(SWITCH)
    connection: Any = partial(BoundedConnection, seconds=request)  # uvicorn calls what it takes for a class
    config = uvicorn.Config(
        app, http=connection, ws="none", timeout_keep_alive=idle,
        timeout_graceful_shutdown=stopping, log_level="warning", access_log=False, **more,
    )  # fmt: skip
    return uvicorn.Server(config)


def run(server: uvicorn.Server, sockets: Sequence[socket.socket]) -> None:
    """Serves until SIGINT or SIGTERM, and answers what was accepted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # once it has stopped, uvicorn raises the signal again
    with suppress(KeyboardInterrupt):
        server.run(list(sockets))
