"""The HTTP response to a request for completions: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .answer import Answer, Piece
from .completions import ParsedBody, Refusal, choice, joined, usage_of, with_echo
from .engine import Busy, ModelFailed, Stopping, Stream
from .prompt_reader import PromptReader

PATHS = {"/v1/completions": False, "/v1/chat/completions": True}
"""Paths, and whether the request is a chat."""


TOGETHER = 64
"""Maximum number of events that are sent together."""


class Completion(Response):
    """The response to a body.  Its requests are closed when it has been sent."""

    def __init__(self, reader: PromptReader, path: str, body: bytes) -> None:
        self._reader, self._path, self._body, self._chat = reader, path, body, PATHS[path]
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        try:
            self._served, body_options, requests = await self._reader.read(self._body, chat=self._chat)
        except Refusal as refusal:
            self._reader.count_refused(self._path, refusal.status)
            raise
        metrics, code = self._served.metrics, 500
        try:
            self._requests, self._form = requests, "tools" if body_options.toolbox.forced else "response_format"
            answers = [self._served.answer(body_options, request) for request in requests]
            prompts = sum(len(request.prompt) + request.forced for request in requests[:: body_options.choices])
            async with self._served.engine.open(requests) as stream:
                metrics.prompt.inc(prompts)
                async with aclosing(self._pieces(stream, answers, began)) as pieces:
                    if body_options.stream:
                        await self._stream(body_options, stream, pieces, answers, prompts, send)
                    else:
                        response = await self._whole(body_options, pieces, answers, prompts)
            code = 200
            metrics.whole.observe(time.perf_counter() - began)
            if not body_options.stream:
                await response(scope, receive, send)
        except asyncio.CancelledError:
            code = 499  # the client disconnected
            raise
        except Busy as error:
            code = 429
            raise Refusal(429, str(error), code="too_many_requests", retry_after=error.seconds) from None
        except TimeoutError:
            code = 503
            raise Refusal(503, f"no token within {self._served.seconds:g} s", code="timeout", retry_after=1) from None
        except Stopping as error:
            code = 503
            raise Refusal(503, str(error), retry_after=1) from None
        except ModelFailed as error:
            code = 500 if self._served.engine.alive else 503
            print(f"serve: {self._served.name}: {error}", file=sys.stderr, flush=True)
            raise Refusal(code, "the model failed; the server's log says why", retry_after=0 if code == 500 else 1) from None
        except Refusal as refusal:
            code = refusal.status
            raise
        finally:
            metrics.answered(self._path, code)

    async def _pieces(self, stream: Stream, answers: Sequence[Answer], began: float) -> AsyncGenerator[tuple[int, Piece]]:
        """Yields (index, piece) of all choices, in the order of arrival."""
        metrics = self._served.metrics
        try:
            async with asyncio.timeout(self._served.seconds):
                update = await anext(stream)
            metrics.first.observe(time.perf_counter() - began)
            while True:
                index, progress = update
                piece = answers[index].push(progress)
                if piece is not None:
                    if piece.reason is not None:
                        stream.cancel(index)  # a stop string ends an answer before the model does
                        self._check_rules(index)
                    yield index, piece
                try:
                    update = await anext(stream)
                except StopAsyncIteration:
                    return
        finally:
            metrics.generated.inc(sum(answer.count for answer in answers))

    def _check_rules(self, index: int) -> None:
        """Raises Refusal if the grammar engine failed for an answer."""
        rules = self._requests[index].rules
        if rules is not None and rules.failure is not None:
            raise Refusal(400, f"{self._form}: the grammar engine gave up: {rules.failure}", self._form)

    async def _whole(
        self, parsed: ParsedBody, pieces: AsyncIterator[tuple[int, Piece]], answers: Sequence[Answer], prompts: int
    ) -> Response:
        """Returns the complete response, after the last token."""
        by_choice: list[list[Piece]] = [[] for _ in answers]
        async for index, piece in pieces:
            by_choice[index].append(piece)
        choices = [choice(parsed, index, joined(parts), self._served.language) for index, parts in enumerate(by_choice)]
        if parsed.echo:
            pairs = zip(choices, self._requests, strict=True)
            choices = [with_echo(choice_json, request.prompt, self._served.language) for choice_json, request in pairs]
        usage = usage_of(prompts, sum(answer.count for answer in answers))
        return JSONResponse(self._head(parsed) | {"choices": choices, "usage": usage})

    async def _stream(
        self, parsed: ParsedBody, stream: Stream, pieces: AsyncIterator[tuple[int, Piece]], answers: Sequence[Answer], prompts: int,
        send: Send,
    ) -> None:  # fmt: skip
        """Sends the response as a stream of server-sent events.  Available events are sent together.  An error during the stream is
        its last event."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        head, started, begun, unsent = self._head(parsed), set[int](), False, list[str]()

        async def event(payload: dict[str, Any] | str, *, more: bool = True) -> None:
            nonlocal begun
            if not begun:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                begun = True
            text = payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
            unsent.append(f"data: {text}\n\n")
            if not more or not stream.behind or len(unsent) == TOGETHER:
                body = "".join(unsent).encode()
                unsent.clear()
                await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            async for index, piece in pieces:
                choice_json = choice(parsed, index, piece, self._served.language, first=index not in started)
                if parsed.echo and index not in started:
                    choice_json = with_echo(choice_json, self._requests[index].prompt, self._served.language)
                started.add(index)
                await event(head | {"choices": [choice_json]} | ({"usage": None} if parsed.usage else {}))
        except Refusal as refusal:
            if not begun:
                raise
            await event(refusal.body(), more=False)
            return
        except ModelFailed as error:
            if not begun:
                raise
            print(f"serve: {self._served.name}: {error}", file=sys.stderr, flush=True)
            await event(Refusal(500, "the model failed; the server's log says why").body(), more=False)
            return
        if parsed.usage:
            await event(head | {"choices": [], "usage": usage_of(prompts, sum(answer.count for answer in answers))})
        await event("[DONE]", more=False)

    def _head(self, parsed: ParsedBody) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if parsed.stream else "chat.completion") if parsed.chat else "text_completion"
        name = f"{'chatcmpl' if parsed.chat else 'cmpl'}-{uuid.uuid4().hex}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": parsed.model or self._served.name}
