"""The socket that a server answers on, open before the server begins: a port that is taken is told in a line."""

from __future__ import annotations

import socket
import sys

SWITCH = 2e-4
"""Seconds after which a thread that computes gives the interpreter to one that waits.  The event loop waits at every read of a
socket: by Python's 5 ms, fifty bodies that come at once kept it from everything else for a second."""


def listen(name: str, host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that listens, and its URL; port 0 takes a free one.  Raises SystemExit, beginning with the program's `name`, where
    the port is taken."""
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise SystemExit(f"{name}: {host}:{port}: {str(error.strerror).partition(' (')[0]}") from None
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it for sockets of its own only: 40 ms an answer
    sys.setswitchinterval(SWITCH)
    taken = listening.getsockname()
    return listening, f"http://{taken[0]}:{taken[1]}"
