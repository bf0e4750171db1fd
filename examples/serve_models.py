"""Bundles over HTTP by the Open Inference Protocol (KServe's v2, which Triton's clients speak), without torch.

    pip install ./bundles '.[serve]'
    mkdir -p models/classifier/1 && cgcompile build classifier.py --sizes 1,8,32 -o models/classifier/1/model.cgb
    python examples/serve_models.py models --port 8000
    curl localhost:8000/v2/models/classifier

GET /v2, /v2/health/live, /v2/health/ready, /v2/models/M[/versions/V][/ready], /metrics; POST /v2/models/M[/versions/V]/infer,
/v2/repository/index, /v2/repository/models/M/load (look at the folder now).  Tensors travel as JSON or as binary data.  Errors are
{"error": "..."}: 400 for what does not fit, 404 for what is not there, 413 too large (more than 4 MiB of JSON, too), 429 with
Retry-After where too many wait, 503 with Retry-After where no version serves yet, or all bodies together are too large, 504 past
the deadline.  Requests of one shape that come within 2 ms of each other go together.  The server is ready when it can serve; each
model has a readiness of its own.  A new version in the folder is loaded, examined and switched to (server/model_versions.py).
SIGTERM takes no more requests and answers those that wait; so does a GPU that fails, and then the status is 1.  For TLS and limits
per client, put a proxy before it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from server.http_limits import BoundedBodies, BoundedConnection
from server.inference_protocol import ProtocolError, TooLarge, metadata, read_request, write_response
from server.listening import listen
from server.metrics import Metrics
from server.model_repository import Repository
from server.model_versions import Model, Options, Version, log, recorded_rows
from server.request_queue import Batch, Busy, Late, Stopping
from server.tracing import batch_spans, request_span
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import cgbundle

HEADER = "Inference-Header-Content-Length"
EXTENSIONS = ["binary_tensor_data", "model_repository"]

REQUEST, IDLE, STOPPING = 30, 5, 60
"""Seconds that a connection has for a whole request, or to take an answer; between two requests; and at the server's end."""


class Refusal(Exception):
    """A request that is answered with an error: its HTTP status, its text, and after how many seconds to try again (0: never)."""

    def __init__(self, status: int, text: str, again: int = 0) -> None:
        super().__init__(text)
        self.status, self.again = status, again


class Server:
    """The application over a folder of models.  `failure`: how the GPU failed, where it did, and `stop` is called then."""

    def __init__(self, folder: str | Path, options: Options, poll: float, largest: int) -> None:
        self.metrics = Metrics()
        self.failure: cgbundle.CgbundleError | None = None
        self.stop: Callable[[], None] = lambda: None
        self.repository = Repository(folder, options, poll, self._watch, self._tell)
        paths = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
        routes = [
            Route("/v2", self._about), Route("/v2/health/live", self._live), Route("/v2/health/ready", self._ready),
            Route("/metrics", self._metrics), Route("/v2/repository/index", self._index, methods=["POST"]),
            Route("/v2/repository/models/{model}/load", self._load, methods=["POST"]),
            *[Route(path, self._model) for path in paths],
            *[Route(f"{path}/ready", self._model_ready) for path in paths],
            *[Route(f"{path}/infer", self._infer, methods=["POST"]) for path in paths],
        ]  # fmt: skip
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(BoundedBodies, largest=largest, field="error", together=largest)],
            exception_handlers={Refusal: refused, HTTPException: refused},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self.repository:
            yield

    def _watch(self, model: str, version: Version, batch: Batch) -> None:
        self.metrics.watch(model, version, batch)
        batch_spans(batch, recorded_rows(sum(batch.rows), version.served.batches))

    def _tell(self, event: dict[str, Any]) -> None:
        log(event)
        if event["event"] in ("serving", "refused"):
            self.metrics.loads.labels(event["model"], event["event"]).inc()

    # --- health and metadata ----------------------------------------------------------------------------------

    async def _about(self, _: Request) -> Response:
        return JSONResponse({"name": "cgbundle", "version": "2", "extensions": EXTENSIONS})

    async def _live(self, _: Request) -> Response:
        if self.failure is not None:
            raise Refusal(503, _one_line(self.failure))
        return JSONResponse({"live": True})

    async def _ready(self, _: Request) -> Response:
        if self.failure is not None:
            raise Refusal(503, _one_line(self.failure))
        return JSONResponse({"ready": True})  # that the server can serve; of each model `/v2/models/M/ready` says so

    async def _model_ready(self, request: Request) -> Response:
        self._version(request)
        return JSONResponse({"ready": True})

    async def _model(self, request: Request) -> Response:
        version = self._version(request)
        name = request.path_params["model"]
        served = version.served
        return JSONResponse(metadata(name, [str(version.number)], served.inputs, served.outputs, served.sizes))

    async def _index(self, _: Request) -> Response:
        rows: list[dict[str, str]] = []
        for name, model in self.repository.models.items():
            if model.current is not None:
                rows.append({"name": name, "version": str(model.current.number), "state": "READY", "reason": ""})
            for number, (_, why) in model.refused.items():
                rows.append({"name": name, "version": str(number), "state": "UNAVAILABLE", "reason": why})
        return JSONResponse(rows)

    async def _load(self, request: Request) -> Response:
        await self.repository.refresh()
        self._version(request)
        return JSONResponse({})

    async def _metrics(self, _: Request) -> Response:
        serving = {name: model.current for name, model in self.repository.models.items() if model.current is not None}
        return Response(self.metrics.text(serving), media_type="text/plain; version=0.0.4; charset=utf-8")

    # --- inference --------------------------------------------------------------------------------------------

    async def _infer(self, request: Request) -> Response:
        body = await request.body()
        version = self._version(request)
        name, number = request.path_params["model"], str(version.number)

        async def serving() -> Version:
            nonlocal version
            version = self._version(request)
            return version

        code = 499  # who asked went away
        try:
            with request_span(name, version.number, request.headers):
                answer = await infer(name, serving, request, body)
            code = 200
            return answer
        except Refusal as refusal:
            code = refusal.status
            raise
        finally:
            self.metrics.requests.labels(name, number, str(code)).inc()
            if version.failure is not None and self.failure is None:
                self.failure = version.failure
                log({"event": "gpu-failed", "model": name, "version": version.number, "why": _one_line(version.failure)})
                self.stop()

    def _version(self, request: Request) -> Version:
        """The version that serves what the path names.  Raises Refusal."""
        name, wanted = request.path_params["model"], request.path_params.get("version")
        model: Model | None = self.repository.models.get(name)
        if model is None:
            raise Refusal(404, f"no model {name!r}; there are {', '.join(sorted(self.repository.models)) or 'none'}")
        if model.current is None:
            raise Refusal(503, f"no version of {name!r} serves", 1)
        if wanted is not None and wanted != str(model.current.number):
            raise Refusal(404, f"version {wanted!r} of {name!r} does not serve; version {model.current.number} does")
        return model.current


async def infer(name: str, serving: Callable[[], Awaitable[Version]], request: Request, body: bytes) -> Response:
    """The answer to an inference request, whose body is `body`, by the version that `serving` gives.  Raises Refusal."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "Content-Encoding: this server takes none")
    version = await serving()
    header = request.headers.get(HEADER)
    try:
        while True:
            served = version.served
            asked = await beside(len(body), read_request, body, header, served.inputs, served.outputs)
            version = await serving()  # no await between here and the queue: a switch comes before or after
            if (version.served.inputs, version.served.outputs) == (served.inputs, served.outputs):
                break
        tensors = await version.answer(asked.tensors, asked.timeout / 1e6)
        size = sum(len(tensor.data) for tensor in tensors)
        text, length = await beside(size, write_response, name, str(version.number), asked, served.outputs, tensors)
    except TooLarge as error:
        raise Refusal(413, str(error)) from None
    except ProtocolError as error:
        raise Refusal(400, str(error)) from None
    except cgbundle.CallError as error:
        raise Refusal(400, _one_line(error)) from None
    except Busy as error:
        raise Refusal(429, str(error), error.seconds) from None
    except Stopping as error:
        raise Refusal(503, str(error), 1) from None
    except Late as error:
        raise Refusal(504, str(error)) from None
    except cgbundle.CgbundleError as error:
        if version.failure is not None:
            raise Refusal(503, "the GPU failed, and this server ends", 1) from None
        log({"event": "failed", "model": name, "version": version.number, "why": _one_line(error)})
        raise Refusal(500, "the model failed; the server's log says why") from None
    if length is None:
        return Response(text, media_type="application/json")
    return Response(text, media_type="application/octet-stream", headers={HEADER: str(length)})


SMALL = 64 << 10
"""Bytes up to which JSON is read and written at once; for more, other requests go on meanwhile."""

BESIDE = ThreadPoolExecutor(1, "json")
"""One thread: the parser keeps the interpreter to itself, and several would keep it from the event loop by turns."""


async def beside(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function gives, called in another thread where it works on many bytes."""
    if size <= SMALL:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(BESIDE, function, *arguments)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


async def refused(_: Request, error: Exception) -> Response:
    """An error in the protocol's form."""
    if isinstance(error, Refusal):
        again = {"Retry-After": str(error.again)} if error.again else None
        return JSONResponse({"error": str(error)}, error.status, again)
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Serve a folder of bundles by the Open Inference Protocol.")
    parser.add_argument("models", help="the folder: <model>/<version>/model.cgb")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one, which a line of the log names")
    parser.add_argument("--wait", type=float, default=2.0, metavar="MS", help="how long a request waits for others (default: 2)")
    parser.add_argument("--limit", type=int, default=1024, help="requests of a model that may wait (default: 1024)")
    parser.add_argument("--deadline", type=float, default=30.0, metavar="S", help="seconds that a request may take (default: 30)")
    parser.add_argument("--poll", type=float, default=1.0, metavar="S", help="seconds between looks at the folder (default: 1)")
    parser.add_argument("--largest", type=int, default=64, metavar="MIB", help="a longer body is refused (default: 64 MiB)")
    parser.add_argument("--devices", metavar="0,1", default="", help="GPUs that have a copy of every model each (default: one GPU)")
    given = parser.parse_args(arguments)
    if not Path(given.models).is_dir():
        raise SystemExit(f"serve_models: {given.models}: no such folder")
    if not all(each.isdigit() for each in given.devices.split(",") if given.devices):
        raise SystemExit(f"serve_models: --devices {given.devices}: expected numbers of GPUs, as in 0,1")
    devices = tuple([int(each) for each in given.devices.split(",") if each])
    server = Server(given.models, Options(given.wait, given.limit, given.deadline, devices), given.poll, given.largest << 20)
    listening, url = listen("serve_models", given.host, given.port)
    log({"event": "listening", "url": url, "torch": "torch" in sys.modules})
    config = uvicorn.Config(
        server.app, http=partial(BoundedConnection, seconds=REQUEST), ws="none", timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=STOPPING, log_level="warning", access_log=False,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # once it has stopped, uvicorn raises the signal again
    running = uvicorn.Server(config)
    server.stop = lambda: setattr(running, "should_exit", True)
    with suppress(KeyboardInterrupt):
        running.run([listening])
    if server.failure is not None:
        raise SystemExit(f"serve_models: the GPU failed: {_one_line(server.failure)}")


if __name__ == "__main__":
    main()
