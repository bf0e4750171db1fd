"""A language model over HTTP as OpenAI's clients speak it, from a bundle, without torch.

    pip install ./bundles '.[serve]'
    cgcompile build ~/models/Qwen3-0.6B
    python examples/serve_llm.py Qwen3-0.6B.cgb --tokenizer ~/models/Qwen3-0.6B
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
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import uvicorn
from language_server.bundle_model import BundleModel
from language_server.completion_response import PATHS, Completion
from language_server.completions import Refusal
from language_server.served_model import ServedModel
from language_server.text import Language
from server.http_limits import BoundedBodies, BoundedConnection
from server.listening import listen
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import cgbundle

REQUEST, IDLE, STOPPING = 30, 5, 120
"""Seconds that a connection has for a whole request, or to take an answer; between two requests; and at the server's end."""

BYTES, TOGETHER = 4 << 20, 64 << 20
"""A longer body is refused, and one for which all that are open leave no room."""


class Server:
    """The application over a model; `app` is Starlette's."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        routes = [Route(path, self._complete, methods=["POST"]) for path in PATHS]
        routes += [Route("/v1/models", self._models), Route("/v1/models/{model:path}", self._model)]
        routes += [Route("/health", self._health), Route("/metrics", self._metrics)]
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(BoundedBodies, largest=BYTES, field="error", together=TOGETHER)],
            exception_handlers={Refusal: refused, HTTPException: refused},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self.served.engine:
            yield

    async def _complete(self, request: Request) -> Response:
        return Completion(self.served, request.url.path, await request.body())

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.served.about()]})

    async def _model(self, request: Request) -> Response:
        self.served.check_name(request.path_params["model"])
        return JSONResponse(self.served.about())

    async def _health(self, _: Request) -> Response:
        engine = self.served.engine
        state = engine.state
        told = {
            "model": self.served.name, "alive": engine.alive, "torch": "torch" in sys.modules, "running": state.running,
            "waiting": state.waiting, "pages_used": state.pages_used, "pages_free": state.pages_free,
        }  # fmt: skip
        return JSONResponse(told, 200 if engine.alive else 503)

    async def _metrics(self, _: Request) -> Response:
        text = self.served.metrics.text(self.served.engine.state)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


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
    print(f"serving {server.served.name} at {url}", file=sys.stderr, flush=True)
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
    parser.add_argument("bundle", help="the directory that `cgcompile build FOLDER` wrote")
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
        served = ServedModel(models, language, given.name or program.manifest.name, given.limit)
        serve(Server(served), given.host, given.port)


if __name__ == "__main__":
    main()
