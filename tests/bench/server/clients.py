"""Child process: `clients.py PORT CLIENTS EACH FIRST` runs many clients of an embedding server. Each keeps its connection and sends
its next request as soon as the last one was answered.

One thread, one selector and prepared requests: 64 clients use little of the CPU time that they share with the server. Reads a line
of JSON from stdin: {"texts": [...], "expected": [[...], ...], "model": ""}. Prints "ready" when all are connected; any line on
stdin starts them. Then prints a line of JSON: {"begin", "end", "answers": [[seconds, number of the text], ...], "difference"}.
FIRST is the number of the first client; the number decides which texts a client sends. With a "model" name, requests have OpenAI's
form.
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import sys
from dataclasses import dataclass, field

from tests.bench.common import serving


class Refused(Exception):
    """An answer whose status is not 200."""


@dataclass(slots=True)
class Client:
    """A connection, its remaining texts (last first), the time of its request, and the bytes received since."""

    connection: socket.socket
    texts: list[int]
    asked: float = 0.0
    came: bytearray = field(default_factory=bytearray)


def request(text: str, model: str) -> bytes:
    """Returns a complete HTTP request."""
    path, fields = ("/v1/embeddings", {"model": model, "input": text}) if model else ("/embed", {"text": text})
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def embedding(body: bytes) -> list[float]:
    """Returns the embedding in an answer of either form."""
    response = json.loads(body)
    vector: list[float] = (response["data"][0] if "data" in response else response)["embedding"]
    return vector


def answer(came: bytearray) -> bytes | None:
    """Returns the body once it is complete, else None. Raises Refused."""
    head, separator, body = bytes(came).partition(b"\r\n\r\n")
    if not separator:
        return None
    lines = head.decode().lower().split("\r\n")
    length = int(next(line for line in lines if line.startswith("content-length:")).partition(":")[2])
    if len(body) < length:
        return None
    if lines[0].split()[1] != "200":
        raise Refused(f"{lines[0]}: {body.decode()}")
    return body


def drive(clients: list[Client], requests: list[bytes]) -> list[tuple[float, int, bytes]]:
    """Returns (seconds, number of the text, body) of every answer. All clients start at once. Raises OSError, Refused."""
    replies: list[tuple[float, int, bytes]] = []
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.connection, selectors.EVENT_READ, client)
            client.asked = serving.now()
            client.connection.sendall(requests[client.texts[-1]])
        while selector.get_map():
            for key, _ in selector.select():
                client = key.data
                received = client.connection.recv(1 << 16)
                if not received:
                    raise Refused("the server closed a connection")
                client.came += received
                if (body := answer(client.came)) is None:
                    continue
                replies.append((serving.now() - client.asked, client.texts.pop(), body))
                client.came.clear()
                if client.texts:
                    client.asked = serving.now()
                    client.connection.sendall(requests[client.texts[-1]])
                else:
                    selector.unregister(client.connection)
    return replies


def main(port: str, clients: str, count: str, first: str) -> None:
    job = json.loads(sys.stdin.readline())
    texts, expected = job["texts"], job["expected"]
    client_list = [
        Client(socket.create_connection(("127.0.0.1", int(port))), random.Random(number).choices(range(len(texts)), k=int(count)))
        for number in range(int(first), int(first) + int(clients))
    ]
    for client in client_list:
        client.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    requests = [request(text, job["model"]) for text in texts]
    print("ready", flush=True)
    sys.stdin.readline()
    begin = serving.now()
    replies = drive(client_list, requests)
    end = serving.now()
    worst = 0.0
    for _, text, body in replies:
        pairs = zip(embedding(body), expected[text], strict=True)
        worst = max(worst, *[abs(a - b) for a, b in pairs])
    answers = [(seconds, text) for seconds, text, _ in replies]
    print(json.dumps({"begin": begin, "end": end, "answers": answers, "difference": worst}))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, Refused) as error:
        raise SystemExit(f"clients: {error}") from None
