"""Runs uvicorn: a socket that listens before the server starts, limits for connections, and an end without a traceback."""

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
"""Argument of sys.setswitchinterval.  The event loop waits for the GIL at every socket read: with Python's 5 ms, fifty simultaneous
bodies blocked it for a second.  A thread that calls a model waits, too: beside a busy thread, six driver calls lost 31 ms with 5
ms, and 1.6 ms with this value."""

REQUEST, IDLE, STOPPING = 30.0, 5, 60
"""Time limits in seconds: for sending a request or receiving a response, of an idle connection, and of a graceful shutdown."""


class PortTaken(Exception):
    """The address cannot be used; the text says why."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 uses a free one.  Raises PortTaken."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise PortTaken(f"{host}:{port}: {str(error.strerror).partition(' (')[0]}") from None
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # saves 40 ms; asyncio sets it only for sockets that it creates
    return listening


def url_of(listening: socket.socket, scheme: str = "http") -> str:
    host, port = listening.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def make_server(
    app: ASGIApp, *, request: float = REQUEST, idle: int = IDLE, stopping: int = STOPPING, **more: Any
) -> uvicorn.Server:
    """Returns the server for an application; times in seconds.  `more`: options of uvicorn, such as certificates."""
    sys.setswitchinterval(SWITCH)
    connection: Any = partial(BoundedConnection, seconds=request)  # uvicorn calls it like a class
    config = uvicorn.Config(
        app, http=connection, ws="none", timeout_keep_alive=idle,
        timeout_graceful_shutdown=stopping, log_level="warning", access_log=False, **more,
    )  # fmt: skip
    return uvicorn.Server(config)


def run(server: uvicorn.Server, sockets: Sequence[socket.socket]) -> None:
    """Serves until SIGINT or SIGTERM, then answers the accepted requests."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises the signal again after it has stopped
    with suppress(KeyboardInterrupt):
        server.run(list(sockets))
