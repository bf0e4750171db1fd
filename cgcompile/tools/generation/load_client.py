"""Sends a load to a server with OpenAI's protocol, and measures when each part of an answer arrives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from ...errors import BuildError
from .load import Answered, Load, Planned, planned, summary


def measure_load(url: str, load: Load) -> dict[str, Any]:
    """Sends a load to the first model of the server at `url`, as streams of /v1/completions.  Raises bench-failed if the server
    does not answer."""
    return asyncio.run(_measure(url, load))


async def _measure(url: str, load: Load) -> dict[str, Any]:
    address = urlsplit(url)
    if address.scheme != "http" or not address.hostname:
        raise BuildError(
            "bench-failed", f"{url}: expected http://HOST:PORT", "start cgcompile serve without TLS: this client speaks only HTTP"
        )
    server = Server(address.hostname, address.port or 80)
    try:
        models = json.loads(b"".join([part async for part in server.answer("GET", "/v1/models")]))
        model = str(models["data"][0]["id"])
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise BuildError(
            "bench-failed", f"{url}: no server with a language model answers: {error}", "start cgcompile serve"
        ) from None
    semaphore = asyncio.Semaphore(load.clients or load.requests)
    begin = perf_counter()

    async def complete(request: Planned) -> Answered:
        await asyncio.sleep(max(0.0, request.after - (perf_counter() - begin)))
        async with semaphore:
            return await server.complete(model, request)

    answers = await asyncio.gather(*[complete(request) for request in planned(load)])
    return summary(load, model, answers, perf_counter() - begin)


class Server:
    """A server; each request uses its own connection."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    async def complete(self, model: str, request: Planned) -> Answered:
        """Sends a request and reads its streamed answer."""
        body = {
            "model": model, "prompt": list(request.prompt), "max_tokens": request.answer, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        begin, times, tokens, error, rest = perf_counter(), list[float](), 0, "", b""
        try:
            async for part in self.answer("POST", "/v1/completions", json.dumps(body).encode()):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(event["error"].get("message", "an error"))
                    if event.get("choices"):
                        times.append(perf_counter() - begin)
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        except (OSError, EOFError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        if not error and not tokens:
            error = "no usage at the end of the stream"
        return Answered(tuple(times), perf_counter() - begin, len(request.prompt), tokens, error)

    async def answer(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[bytes]:
        """Yields the body of an answer as it arrives.  Raises OSError, EOFError, and ValueError for a status other than 200."""
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in [field.partition(":") for field in fields]}
            if status.split()[1] != "200":
                raise ValueError(f"{status}: {(await reader.read(500)).decode(errors='replace')}")
            if headers.get("transfer-encoding") == "chunked":
                while size := int(await reader.readline(), 16):
                    yield (await reader.readexactly(size + 2))[:-2]
            else:
                while part := await reader.read(1 << 16):
                    yield part
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
