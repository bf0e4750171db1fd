"""examples/serve.py with clients that send too much, send too slowly, or disconnect.  Uses real sockets and a fake model."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest

from cgbundle.errors import CallError, MachineError
from tests.helpers.places import ROOT

for package in ("starlette", "uvicorn", "tokenizers"):
    pytest.importorskip(package, reason="pip install '.[serve]'")

from cgserve.batching.token_batches import Batcher  # noqa: E402
from cgserve.transport.limits import BoundedBodies  # noqa: E402
from cgserve.transport.running import make_server  # noqa: E402

EXAMPLES = ROOT / "examples"
BYTES = 256 << 10
SECONDS, IDLE = 1.5, 2
"""Time limits in seconds for a whole request, and for an idle connection.  They are long enough for a busy machine."""


@pytest.fixture(scope="module")
def serve() -> Iterator[ModuleType]:
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package, reason="pip install '.[serve]'")
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("serve")
    sys.path.remove(str(EXAMPLES))


class Model:
    """Waits until `go` is set, then returns the rows unchanged."""

    def __init__(self) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        self.rows: list[list[int]] = []
        self.go.set()

    def __call__(self, rows: Sequence[Sequence[int]], length: int) -> list[Any]:
        self.began.set()
        assert self.go.wait(60)
        self.rows += [list(row) for row in rows]
        if any(99 in row for row in rows):
            raise CallError("input-shape", "token 99:\nout of range")
        if any(98 in row for row in rows):
            raise MachineError("driver-failed", "the GPU\nis gone")
        return [list(row) for row in rows]


class Running:
    """A server in a thread, with batches of 2 and a queue of 3.  `sending`: size of the socket's send buffer."""

    def __init__(self, serve: ModuleType, seconds: float, idle: int = 1, sending: int = 0) -> None:
        self.model = Model()
        batcher = Batcher(self.model, (8,), 2, 0.0, 3)
        app = serve.make_app(batcher, lambda text: [int(word) for word in text.split()], {})
        self.server = make_server(app, request=seconds, idle=idle)
        listening = socket.create_server(("127.0.0.1", 0))
        if sending:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sending)
        self.port = listening.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, args=([listening],))
        self.thread.start()

    def stop(self) -> None:
        self.model.go.set()
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def ask(self, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        """Returns (status, body, headers) of a request on a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/embed", body, {"Content-Type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        content = json.loads(answer.read())
        connection.close()
        return answer.status, content, dict(answer.getheaders())

    def embed(self, text: str) -> tuple[int, Any, dict[str, str]]:
        return self.ask(json.dumps({"text": text}).encode())


@pytest.fixture(scope="module")
def shared(serve: ModuleType) -> Iterator[Running]:
    """A server with long timeouts, for tests that do not change it."""
    running = Running(serve, 20)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def strict(serve: ModuleType) -> Iterator[Running]:
    """A server with short timeouts."""
    running = Running(serve, SECONDS, IDLE)
    yield running
    running.stop()


@pytest.fixture
def running(serve: ModuleType) -> Iterator[Running]:
    """A server for one test."""
    server = Running(serve, 20)
    yield server
    server.stop()


def head(length: int | None, *lines: str) -> bytes:
    """Returns the head of a request with a body of this length, or with a chunked body."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return "\r\n".join(["POST /embed HTTP/1.1", "Host: here", "Content-Type: application/json", size, *lines, "", ""]).encode()


def request(text: str) -> bytes:
    body = json.dumps({"text": text}).encode()
    return head(len(body)) + body


def status(connection: socket.socket) -> int:
    """Returns the status of the next answer, after reading its body."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def is_closed(connection: socket.socket) -> bool:
    """Returns whether the server closes the connection without sending another byte."""
    try:
        return connection.recv(1000) == b""
    except ConnectionError:
        return True


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# --- bodies -------------------------------------------------------------------------------------------------------


def test_a_body_with_a_too_large_content_length_is_refused_before_it_is_read(shared: Running, serve: ModuleType) -> None:
    with shared.connect() as connection:
        connection.sendall(head(1 << 40))  # the client sends no byte of the body
        assert status(connection) == 413
    code, response, _ = shared.ask(b" " * (BYTES + 1))
    assert (code, response) == (413, {"detail": f"body: more than {BYTES} bytes"})
    assert shared.embed("1 2")[0] == 200


def test_expect_100_continue_is_answered_before_the_body_is_sent(shared: Running) -> None:
    """curl sends this header before large bodies."""
    with shared.connect() as connection:
        connection.sendall(head(1 << 30, "Expect: 100-continue"))
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    with shared.connect() as connection:
        connection.sendall(head(13, "Expect: 100-continue"))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b'{"text": "1"}')
        assert status(connection) == 200


def test_chunks_are_counted(shared: Running, serve: ModuleType) -> None:
    with shared.connect() as connection:
        connection.sendall(head(None))
        for _ in range(BYTES // 0x8000 + 1):
            connection.sendall(b"8000\r\n" + b" " * 0x8000 + b"\r\n")
        assert status(connection) == 413


def test_a_body_up_to_the_limit_is_read(shared: Running, serve: ModuleType) -> None:
    body = b'{"text": "1 2"}'
    assert shared.ask(body.ljust(BYTES))[:2] == (200, {"embedding": [1, 2], "tokens": 2})


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000, b'{"text": "\\ud800"}', b'{"text": ' + b"9" * 5000 + b"}", b'{"text": 1e999}', b'{"text": NaN}', b"\0" * 9,
        b'{"text": {"text": "1"}}',
    ],
)  # fmt: skip
def test_a_hostile_body_gets_an_error_of_one_line(shared: Running, body: bytes) -> None:
    code, response, _ = shared.ask(body)
    assert code == 400 and list(response) == ["detail"] and "\n" not in response["detail"], response


def test_an_error_of_the_model_has_one_line(shared: Running, capfd: pytest.CaptureFixture[str]) -> None:
    assert shared.embed("99")[:2] == (422, {"detail": "token 99: out of range"})
    assert capfd.readouterr().err == ""
    assert shared.embed("98")[:2] == (500, {"detail": "the model failed; the server's log says why"})
    assert capfd.readouterr().err == "serve: the GPU is gone\n"


# --- time ---------------------------------------------------------------------------------------------------------


def test_a_connection_without_a_whole_request_is_closed(strict: Running) -> None:
    begin = time.monotonic()
    parts = (b"", b"POST /emb", head(10), head(10) + b'{"te', head(None), head(None) + b"2\r\n{}\r\n")
    connections = [strict.connect() for _ in parts]
    for connection, sent in zip(connections, parts, strict=True):
        connection.sendall(sent)
    for connection in connections:
        assert is_closed(connection)
        assert SECONDS / 2 < time.monotonic() - begin < 60
        connection.close()


def test_single_bytes_do_not_extend_the_time_limit(strict: Running) -> None:
    begin = time.monotonic()
    connections = {
        strict.connect(): beginning for beginning in (b"POST /embed HTTP/1.1\r\nX: ", head(10**5), head(None) + b"99999\r\n")
    }
    for connection, beginning in connections.items():
        connection.sendall(beginning)
    while connections and time.monotonic() - begin < 60:
        for connection in [*connections]:
            try:
                connection.sendall(b" ")
            except ConnectionError:
                connection.close()
                del connections[connection]
        time.sleep(SECONDS / 10)
    assert SECONDS / 2 < time.monotonic() - begin < 50


def test_a_connection_is_kept_between_requests_and_closed_when_idle(strict: Running) -> None:
    begin = time.monotonic()
    with strict.connect() as connection:
        for _ in range(3):
            connection.sendall(request("1"))
            assert status(connection) == 200
            time.sleep(SECONDS / 2)
        assert is_closed(connection)
    assert SECONDS < time.monotonic() - begin < 60


def test_the_rest_of_a_refused_body_does_not_extend_the_time_limit(strict: Running) -> None:
    """The server reads and drops the body until the time limit: some clients send the whole body before they read."""
    begin = time.monotonic()
    with strict.connect() as connection:
        connection.sendall(head(1 << 40))
        assert status(connection) == 413
        try:
            while time.monotonic() - begin < 60:
                connection.sendall(b" " * 1000)
                time.sleep(0.01)
        except ConnectionError:
            pass
    assert time.monotonic() - begin < 50


def test_an_incomplete_next_request_does_not_extend_the_time_limit(strict: Running) -> None:
    with strict.connect() as connection:
        connection.sendall(request("1") + head(10))
        assert status(connection) == 200
        assert is_closed(connection)


def slow_connection(running: Running) -> socket.socket:
    """Returns a connection with a small receive buffer, from which the client does not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", running.port))
    return connection


def test_a_client_that_reads_no_answers_is_disconnected(serve: ModuleType) -> None:
    """The client sends requests without end and reads no answers."""
    running = Running(serve, SECONDS, sending=4096)
    try:
        with slow_connection(running) as connection:
            connection.settimeout(0.2)
            try:
                for _ in range(100_000):
                    connection.sendall(b"GET /nothing HTTP/1.1\r\nHost: here\r\n\r\n" * 100)
            except (TimeoutError, ConnectionError):  # on a slow machine the server has closed the connection already
                pass
            wait_for(lambda: not running.server.server_state.connections)
    finally:
        running.stop()


@pytest.mark.parametrize("last", (b"", b"Connection: close\r\n"), ids=("kept", "closed"))
def test_a_client_that_does_not_read_the_last_answers_is_disconnected(serve: ModuleType, last: bytes) -> None:
    """The unread answers are fewer bytes than the limit at which the server pauses writing."""
    running = Running(serve, SECONDS, sending=4096)
    try:
        with slow_connection(running) as connection:
            beginning = b"GET /nothing HTTP/1.1\r\nHost: here\r\n"
            connection.sendall((beginning + b"\r\n") * 199 + beginning + last + b"\r\n")
            wait_for(lambda: running.server.server_state.total_requests == 200)
            (connection_state,) = running.server.server_state.connections
            assert 0 < connection_state.transport.get_write_buffer_size() < 64 << 10
            wait_for(lambda: not running.server.server_state.connections)
    finally:
        running.stop()


# --- clients that leave -------------------------------------------------------------------------------------------


def test_the_request_of_a_client_that_disconnected_is_not_computed(running: Running) -> None:
    running.model.go.clear()
    with running.connect() as first, running.connect() as stays:
        first.sendall(request("1"))
        assert running.model.began.wait(60)
        leaves = [running.connect() for _ in range(2)]
        for connection in leaves:
            connection.sendall(request("2"))
        wait_for(lambda: len(running.server.server_state.tasks) == 3)
        for connection in leaves:
            connection.close()
        wait_for(lambda: len(running.server.server_state.tasks) == 1)
        stays.sendall(request("3"))
        wait_for(lambda: len(running.server.server_state.tasks) == 2)
        running.model.go.set()
        assert (status(first), status(stays)) == (200, 200)
    assert running.model.rows == [[1], [3]]


def test_a_cancelled_task_cancels_its_request(serve: ModuleType) -> None:
    """The middleware handles only disconnects of clients; it passes on a cancellation of its task."""

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def run(leaves: bool) -> str:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        bounded = BoundedBodies(slow, 10)
        task = asyncio.create_task(bounded({"type": "http", "headers": []}, messages.get, None))
        await asyncio.sleep(0.01)
        messages.put_nowait({"type": "http.disconnect"}) if leaves else task.cancel()
        await asyncio.wait([task], timeout=60)
        return "cancelled" if task.cancelled() else "done"

    assert asyncio.run(run(leaves=True)) == "done"
    assert asyncio.run(run(leaves=False)) == "cancelled"


def test_a_full_queue_sends_retry_after(running: Running) -> None:
    running.model.go.clear()
    connections = [running.connect() for _ in range(4)]
    connections[0].sendall(request("1"))
    assert running.model.began.wait(60)
    for connection in connections[1:]:
        connection.sendall(request("2"))
    wait_for(lambda: len(running.server.server_state.tasks) == 4)
    code, response, headers = running.embed("3")
    assert (code, response) == (503, {"detail": "3 requests wait already"}) and int(headers["retry-after"]) > 0
    running.model.go.set()
    assert [status(connection) for connection in connections] == [200] * 4
    assert running.embed("3")[0] == 200
    for connection in connections:
        connection.close()


# --- shutdown ----------------------------------------------------------------------------------------------------


def test_an_incomplete_request_does_not_delay_shutdown(serve: ModuleType) -> None:
    running = Running(serve, SECONDS)
    with running.connect() as connection:
        connection.sendall(head(10))
        wait_for(lambda: len(running.server.server_state.tasks) == 1)
        running.stop()
        assert is_closed(connection)


SLOW = """
import sys, threading, time
import serve
from cgserve.batching import token_batches
from cgserve.transport.running import listen, make_server, run, url_of

texts = []

def tokens(text):
    texts.append(text)
    return [int(word) for word in text.split()]

def model(rows, length):
    while len(texts) < 5:
        time.sleep(0.01)
    print("called", file=sys.stderr, flush=True)
    time.sleep(0.2)
    return [list(row) for row in rows]

batcher = token_batches.Batcher(model, (8,), 2, 0.0)
listening = listen("127.0.0.1", 0)
print("serving slow at", url_of(listening), file=sys.stderr, flush=True)
run(make_server(serve.make_app(batcher, tokens, {})), [listening])
"""


def test_sigterm_answers_waiting_requests_and_accepts_no_more(serve: ModuleType) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW],
        env={"PYTHONPATH": f"{EXAMPLES}:{ROOT / 'bundles'}", "PATH": ""}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        port = int(process.stderr.readline().rsplit(":", 1)[1])
        idle, *waiting = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(6)]
        for connection in waiting:
            connection.sendall(request("1"))
        assert process.stderr.readline() == "called\n", "five requests need three calls, and the first call has begun"
        time.sleep(0.05)
        process.terminate()
        assert [status(connection) for connection in waiting] == [200] * 5
        assert process.wait(60) == 0
        assert is_closed(idle)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)
        assert set(process.stderr.read().split()) <= {"called"}
        for connection in (idle, *waiting):
            connection.close()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_all_bodies_together_have_a_limit(serve: ModuleType) -> None:
    """Bodies that are still being received count too, until their clients disconnect."""
    limits = importlib.import_module("cgserve.transport.limits")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(len((await receive())["body"])).encode()})

    async def session() -> None:
        bounded, never = limits.BoundedBodies(app, 100, together=150), asyncio.Event()

        async def ask(first: int, declared: int, rest: asyncio.Event | None = None) -> int:
            unread = [{"type": "http.request", "body": b"x" * first, "more_body": rest is not None}]
            messages: list[Any] = []

            async def receive() -> Any:
                if unread:
                    return unread.pop()
                await (rest or never).wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                messages.append(message)

            headers = [(b"content-length", str(declared).encode())] if declared else []
            await bounded({"type": "http", "headers": headers}, receive, send)
            return messages[0]["status"] if messages else 0

        left = asyncio.Event()
        unfinished = [asyncio.create_task(ask(70, 75, left)) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await ask(10, 10) == 200
        assert await ask(11, 11) == 503
        assert await ask(11, 0) == 503
        assert await ask(0, 101) == 413
        left.set()
        assert await asyncio.gather(*unfinished) == [0, 0]
        assert await ask(100, 100) == 200

    asyncio.run(session())
