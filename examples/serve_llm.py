"""A language model over HTTP as OpenAI's clients speak it, from a bundle of causal_lm.py, without torch.

    pip install '.[serve]'
    CAUSAL_LM=~/models/Qwen3-0.6B cgcompile build examples/causal_lm.py -o qwen.cgb --sizes prefill:batch=1 \\
        --sizes prefill:seq=128 --sizes decode:batch=1,8 --sizes generate:batch=1,8 --sizes blocks=64
    python examples/serve_llm.py qwen.cgb --tokenizer ~/models/Qwen3-0.6B
    curl localhost:8000/v1/completions --json '{"prompt": "The cat", "max_tokens": 20}'

POST /v1/completions, /v1/chat/completions (both with `stream`); GET /v1/models, /health, /metrics.  Requests join and leave the
model's calls at every token (language_server/scheduler.py).  A client that goes away frees its part of the cache.  Errors are
OpenAI's: 400 for what does not fit, or is not done (tools, images, penalties by count, `echo`), 404 for another model's name, 413
too large, 429 with Retry-After where too many requests are open, 503 where the model has ended.  SIGTERM takes no more requests and
answers those that are open.  Beside OpenAI's fields there are `top_k` and `repetition_penalty`.  For TLS, keys and limits per
client, put a proxy before it.

The tokenizer's folder is one in the Hub's layout: tokenizer.json, and where they are, tokenizer_config.json or chat_template.jinja
(for chats), config.json and generation_config.json (tokens that end an answer, and the longest text).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from language_server.answer import Answer, Piece
from language_server.bundle_model import BundleModel
from language_server.completions import Asked, Refusal, choice, joined, read_request, usage_of
from language_server.engine import Busy, Model, ModelFailed, Stream
from language_server.engines import Engines
from language_server.metrics import Metrics
from language_server.scheduler import Request as Asking
from language_server.text import Language
from server.http_limits import BoundedBodies, BoundedConnection
from server.listening import listen
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import cgbundle

REQUEST, IDLE, STOPPING = 30, 5, 120
"""Seconds that a connection has for a whole request, or to take an answer; between two requests; and at the server's end."""

BYTES = 4 << 20
"""A longer body is refused."""

PATHS = {"/v1/completions": False, "/v1/chat/completions": True}
"""What answers, and whether it is a chat."""


class Server:
    """The application over a model; `app` is Starlette's."""

    def __init__(self, models: Sequence[Model], language: Language, name: str, limit: int) -> None:
        """`models`: a copy for each device; `name`: what clients call them; `limit`: requests that may be open on each, running and
        waiting."""
        self.language, self.name = language, name
        self.metrics = Metrics()
        self.engine = Engines(models, limit, self.metrics.watch)
        self.context = min(self.engine.limits.context, language.positions or self.engine.limits.context)
        self.created = int(time.time())
        routes = [Route(path, self._complete, methods=["POST"]) for path in PATHS]
        routes += [Route("/v1/models", self._models), Route("/v1/models/{model:path}", self._model)]
        routes += [Route("/health", self._health), Route("/metrics", self._metrics)]
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(BoundedBodies, largest=BYTES, field="error")],
            exception_handlers={Refusal: refused, HTTPException: refused},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self.engine:
            yield

    # --- what is served -----------------------------------------------------------------------------------------------

    def _about(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "cgbundle", "max_model_len": self.context}

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def _model(self, request: Request) -> Response:
        self._check_name(request.path_params["model"])
        return JSONResponse(self._about())

    async def _health(self, _: Request) -> Response:
        state = self.engine.state
        told = {
            "model": self.name, "alive": self.engine.alive, "torch": "torch" in sys.modules, "running": state.running,
            "waiting": state.waiting, "pages_used": state.pages_used, "pages_free": state.pages_free,
        }  # fmt: skip
        return JSONResponse(told, 200 if self.engine.alive else 503)

    async def _metrics(self, _: Request) -> Response:
        text = self.metrics.text(self.engine.state)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    # --- completions --------------------------------------------------------------------------------------------------

    async def _complete(self, request: Request) -> Response:
        return Completion(self, request.url.path, await request.body())

    def _check_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise Refusal(404, f"no model {name!r}; there is {self.name}", "model", "model_not_found")

    async def requests_of(self, asked: Asked) -> list[Asking]:
        """A request for each choice of each prompt.  Raises Refusal."""
        self._check_name(asked.model)
        count = asked.choices * max(1, len(asked.prompts))
        if count > self.engine.limit:
            raise Refusal(400, f"n: {count} answers asked for; {self.engine.limit} requests may be open", "n")
        prompts = [await self._chat(asked)] if asked.chat else [await self._prompt(each) for each in asked.prompts]
        found = []
        for prompt in prompts:
            most = self.context - len(prompt) if asked.most is None else asked.most
            if len(prompt) + max(1, most) > self.context:
                text = f"the model takes {self.context} tokens; the prompt has {len(prompt)}, and max_tokens is {max(1, most)}"
                raise Refusal(400, text, "messages" if asked.chat else "prompt", "context_length_exceeded")
            for index in range(asked.choices):
                sampling = replace(asked.sampling, seed=asked.sampling.seed + index, alternatives=asked.alternatives or 0)
                found.append(Asking(prompt=prompt, most=most, stop=self.language.stop, sampling=sampling))
        return found

    async def _prompt(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            tokens = await asyncio.to_thread(self.language.tokens, prompt, special=True)
        elif not all(0 <= token < self.language.size for token in prompt):
            raise Refusal(400, f"prompt: expected tokens from 0 to {self.language.size - 1}", "prompt")
        else:
            tokens = prompt
        if not tokens:
            raise Refusal(400, "prompt: no token", "prompt")
        return tokens

    async def _chat(self, asked: Asked) -> tuple[int, ...]:
        if self.language.chat is None:
            raise Refusal(400, "the tokenizer has no chat template; use /v1/completions", "messages")
        try:
            text = self.language.chat.render(asked.messages)
        except ValueError as error:
            raise Refusal(400, f"messages: {error}", "messages") from None
        tokens = await asyncio.to_thread(self.language.tokens, text, special=False)
        if not tokens:
            raise Refusal(400, "messages: no token", "messages")
        return tokens


class Completion(Response):
    """The answer to a body: its requests live as long as it is being sent."""

    def __init__(self, server: Server, path: str, body: bytes) -> None:
        self._server, self._path, self._body, self._chat = server, path, body, PATHS[path]
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics, code = self._server.metrics, 500
        began = time.perf_counter()
        try:
            asked = read_request(self._body, chat=self._chat)
            requests = await self._server.requests_of(asked)
            answers = [Answer(self._server.language.text, request.prompt, asked.stop) for request in requests]
            prompts = sum(len(request.prompt) for request in requests[:: asked.choices])
            async with self._server.engine.open(requests) as stream:
                metrics.prompt.inc(prompts)
                async with aclosing(self._pieces(stream, answers, began)) as pieces:
                    if asked.stream:
                        await self._stream(asked, pieces, answers, prompts, send)
                    else:
                        told = await self._whole(asked, pieces, answers, prompts)
            code = 200
            metrics.whole.observe(time.perf_counter() - began)
            if not asked.stream:
                await told(scope, receive, send)
        except asyncio.CancelledError:
            code = 499  # who asked went away
            raise
        except Busy as error:
            code = 429
            raise Refusal(429, str(error), code="too_many_requests", again=error.seconds) from None
        except ModelFailed as error:
            code = 500 if self._server.engine.alive else 503
            print("serve_llm:", error, file=sys.stderr, flush=True)
            raise Refusal(code, "the model failed; the server's log says why", again=0 if code == 500 else 1) from None
        except Refusal as refusal:
            code = refusal.status
            raise
        finally:
            metrics.requests.labels(self._path, str(code)).inc()

    async def _pieces(self, stream: Stream, answers: Sequence[Answer], began: float) -> AsyncGenerator[tuple[int, Piece]]:
        """(index, piece) of all choices as they come."""
        metrics, first = self._server.metrics, True
        try:
            async for index, progress in stream:
                if first:
                    metrics.first.observe(time.perf_counter() - began)
                    first = False
                piece = answers[index].push(progress)
                if piece is None:
                    continue
                if piece.reason is not None:
                    stream.cancel(index)  # a stop string ends it before the model does
                yield index, piece
        finally:
            metrics.made.inc(sum(answer.count for answer in answers))

    async def _whole(
        self, asked: Asked, pieces: AsyncIterator[tuple[int, Piece]], answers: Sequence[Answer], prompts: int
    ) -> Response:
        """The answer in one."""
        found: list[list[Piece]] = [[] for _ in answers]
        async for index, piece in pieces:
            found[index].append(piece)
        choices = [choice(asked, index, joined(each), self._server.language) for index, each in enumerate(found)]
        usage = usage_of(prompts, sum(answer.count for answer in answers))
        return JSONResponse(self._head(asked) | {"choices": choices, "usage": usage})

    async def _stream(
        self, asked: Asked, pieces: AsyncIterator[tuple[int, Piece]], answers: Sequence[Answer], prompts: int, send: Send
    ) -> None:
        """The answer piece by piece, as server-sent events.  What fails on the way is the last event."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        head, spoken, begun = self._head(asked), set[int](), False

        async def event(told: dict[str, Any] | str, *, more: bool = True) -> None:
            nonlocal begun
            if not begun:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                begun = True
            text = told if isinstance(told, str) else json.dumps(told, ensure_ascii=False, separators=(",", ":"))
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": more})

        try:
            async for index, piece in pieces:
                told = choice(asked, index, piece, self._server.language, first=index not in spoken)
                spoken.add(index)
                await event(head | {"choices": [told]} | ({"usage": None} if asked.usage else {}))
        except ModelFailed as error:
            if not begun:
                raise
            print("serve_llm:", error, file=sys.stderr, flush=True)
            await event(Refusal(500, "the model failed; the server's log says why").body(), more=False)
            return
        if asked.usage:
            await event(head | {"choices": [], "usage": usage_of(prompts, sum(answer.count for answer in answers))})
        await event("[DONE]", more=False)

    def _head(self, asked: Asked) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if asked.stream else "chat.completion") if asked.chat else "text_completion"
        name = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self._server.name}


async def refused(_: Request, error: Exception) -> Response:
    """An error as OpenAI's clients read it."""
    if isinstance(error, HTTPException):
        error = Refusal(error.status_code, error.detail)
    assert isinstance(error, Refusal)
    return JSONResponse(error.body(), error.status, {"Retry-After": str(error.again)} if error.again else None)


def make_server(app: Starlette) -> uvicorn.Server:
    """The server around the application."""
    config = uvicorn.Config(
        app, http=partial(BoundedConnection, seconds=REQUEST), ws="none", timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=STOPPING, log_level="warning", access_log=False,
    )  # fmt: skip
    return uvicorn.Server(config)


def serve(server: Server, host: str, port: int) -> None:
    """Serves until SIGINT or SIGTERM, and answers what is open.  Raises SystemExit where the port is taken."""
    listening, url = listen("serve_llm", host, port)
    print(f"serving {server.name} at {url}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # once it has stopped, uvicorn raises the signal again
    with suppress(KeyboardInterrupt):
        make_server(server.app).run([listening])


def load(bundle: str, devices: Sequence[int] | None, threads: int | None) -> cgbundle.Program | cgbundle.Replicas:
    """The model, or a copy on each of `devices`.  Raises a CgbundleError."""
    if devices is None:
        return cgbundle.load(bundle, threads=threads)
    return cgbundle.load(bundle, devices=devices, replicas=True, threads=threads)


def numbers(text: str) -> list[int]:
    """`0,1` -> [0, 1].  Raises ValueError."""
    return [int(each) for each in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Serve a language model from a bundle over HTTP, as OpenAI's clients speak it.")
    parser.add_argument("bundle", help="the directory that `cgcompile build examples/causal_lm.py` wrote")
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER", help="a folder with tokenizer.json, in the Hub's layout")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one, which the first line names")
    parser.add_argument("--name", help="what clients call the model (default: the bundle's)")
    parser.add_argument("--limit", type=int, default=256, help="requests that may be open on each device (default: 256)")
    parser.add_argument(
        "--turns", type=int, default=8, metavar="N",
        help="tokens that one call may make for each request where no other waits (default: 8; 1: one by one)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a call on the CPU; 1 beside other work")
    parser.add_argument(
        "--devices", type=numbers, metavar="0,1", help="GPUs that have a copy of the model each (default: one GPU, or the CPU)"
    )
    given = parser.parse_args(arguments)
    try:
        program = load(given.bundle, given.devices, given.threads)
    except cgbundle.CgbundleError as error:
        raise SystemExit(f"serve_llm: {error}" + (f"\nhint: {error.hint}" if error.hint else "")) from None
    with program:
        try:
            each = program.programs if isinstance(program, cgbundle.Replicas) else [program]
            models, language = [BundleModel(own, given.turns) for own in each], Language(given.tokenizer)
            if language.size > models[0].vocabulary:
                text = f"{given.tokenizer}: the tokenizer has {language.size} tokens, the model {models[0].vocabulary}"
                raise ValueError(text)
        except ValueError as error:
            raise SystemExit(f"serve_llm: {error}") from None
        serve(Server(models, language, given.name or program.manifest.name, given.limit), given.host, given.port)


if __name__ == "__main__":
    main()
