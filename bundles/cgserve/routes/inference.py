"""The Open Inference Protocol (KServe's v2, which Triton's clients speak) over HTTP, for the entries of all bundles of a server.

GET /v2, /v2/health/live, /v2/health/ready, /v2/models/M[/versions/V][/ready]; POST /v2/models/M[/versions/V]/infer,
/v2/repository/index, /v2/repository/models/M/load (look at the folder now).  M is a model, or M.ENTRY where its bundle has several
entries.  Tensors travel as JSON or as binary data.  Errors are {"error": "..."}: 400 for what does not fit, 404 for what is not
there, 413 too large (more than 4 MiB of JSON, too), 429 with Retry-After where too many wait, 503 with Retry-After where no version
serves yet, or all bodies together are too large, 504 past the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import cgbundle

from ..batching.request_queue import Busy, Late, Stopping
from ..batching.tracing import request_span
from ..log import Tell, one_line
from ..models.model_repository import Repository
from ..models.version import Version
from ..tensors.inference_protocol import ProtocolError, TooLarge, metadata, read_request, write_response
from ..tensors.metrics import Metrics

HEADER = "Inference-Header-Content-Length"
EXTENSIONS = ["binary_tensor_data", "model_repository"]

Serving = tuple[Version, str]
"""A version and the name of one of its entries."""


class Refusal(Exception):
    """A request that is answered with an error: its HTTP status, its text, and after how many seconds to try again (0: never)."""

    def __init__(self, status: int, text: str, again: int = 0) -> None:
        super().__init__(text)
        self.status, self.again = status, again


class Inference:
    """The routes below /v2.  `health` says why the server is of no use, or None; `ready` why it is not ready yet, or None."""

    def __init__(
        self, repository: Repository, metrics: Metrics, tell: Tell, health: Callable[[], str | None],
        ready: Callable[[], str | None],
    ) -> None:  # fmt: skip
        self._repository, self._metrics, self._tell, self._health, self._why_not_ready = repository, metrics, tell, health, ready
        paths = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
        self.routes = [
            Route("/v2", self._about), Route("/v2/health/live", self._live), Route("/v2/health/ready", self._ready),
            Route("/v2/repository/index", self._index, methods=["POST"]),
            Route("/v2/repository/models/{model}/load", self._load, methods=["POST"]),
            *[Route(path, self._model) for path in paths],
            *[Route(f"{path}/ready", self._model_ready) for path in paths],
            *[Route(f"{path}/infer", self._infer, methods=["POST"]) for path in paths],
        ]  # fmt: skip

    # --- health and metadata ----------------------------------------------------------------------------------

    async def _about(self, _: Request) -> Response:
        return JSONResponse({"name": "cgbundle", "version": "2", "extensions": EXTENSIONS})

    async def _live(self, _: Request) -> Response:
        if why := self._health():
            raise Refusal(503, why)
        return JSONResponse({"live": True})

    async def _ready(self, _: Request) -> Response:
        if why := self._health() or self._why_not_ready():
            raise Refusal(503, why)
        return JSONResponse({"ready": True})

    async def _model_ready(self, request: Request) -> Response:
        self._find(request)
        return JSONResponse({"ready": True})

    async def _model(self, request: Request) -> Response:
        version, entry = self._entry(request)
        ports = version.entries[entry].ports
        return JSONResponse(metadata(entry, [str(version.number)], ports.inputs, ports.outputs, ports.sizes))

    async def _index(self, _: Request) -> Response:
        rows: list[dict[str, str]] = []
        for name, model in self._repository.models.items():
            if model.current is not None:
                number = str(model.current.number)
                rows += [{"name": each, "version": number, "state": "READY", "reason": ""} for each in model.current.names]
            for refused_one, (_identity, why) in model.refused.items():
                rows.append({"name": name, "version": str(refused_one), "state": "UNAVAILABLE", "reason": str(why)})
        return JSONResponse(rows)

    async def _load(self, request: Request) -> Response:
        await self._repository.refresh()
        self._find(request)
        return JSONResponse({})

    # --- inference --------------------------------------------------------------------------------------------

    async def _infer(self, request: Request) -> Response:
        body = await request.body()
        version, entry = self._entry(request)

        async def serving() -> Serving:
            nonlocal version
            version, _ = self._entry(request)
            return version, entry

        code = 499  # who asked went away
        try:
            with request_span(entry, version.number, request.headers):
                answer = await infer(serving, request, body, self._tell)
            code = 200
            return answer
        except Refusal as refusal:
            code = refusal.status
            raise
        finally:
            self._metrics.requests.labels(entry, str(version.number), str(code)).inc()

    def _entry(self, request: Request) -> Serving:
        """The version that serves what the path names, and the entry.  Raises Refusal."""
        version, name = self._find(request), request.path_params["model"]
        if version.language is not None:
            raise Refusal(400, f"{name!r} is a language model: POST to /v1/chat/completions or /v1/completions")
        if name not in version.entries:
            raise Refusal(404, f"{name!r} has several entries, each of which is a model: {', '.join(version.entries)}")
        return version, name

    def _find(self, request: Request) -> Version:
        """The version that serves what the path names.  Raises Refusal."""
        models, name, wanted = self._repository.models, request.path_params["model"], request.path_params.get("version")
        model = models.get(name) or models.get(name.rpartition(".")[0])
        if model is None or (name not in models and model.current is not None and name not in model.current.names):
            there = sorted([each for version in self._repository.serving() for each in version.names])
            raise Refusal(404, f"no model {name!r}; there are {', '.join(there) or 'none'}")
        if model.current is None:
            raise Refusal(503, f"no version of {name!r} serves", 1)
        if wanted is not None and wanted != str(model.current.number):
            raise Refusal(404, f"version {wanted!r} of {name!r} does not serve; version {model.current.number} does")
        return model.current


async def infer(serving: Callable[[], Awaitable[Serving]], request: Request, body: bytes, tell: Tell) -> Response:
    """The answer to an inference request, whose body is `body`, by what `serving` gives.  Raises Refusal."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "Content-Encoding: this server takes none")
    version, entry = await serving()
    header = request.headers.get(HEADER)
    try:
        while True:
            ports = version.entries[entry].ports
            asked = await beside(len(body), read_request, body, header, ports.inputs, ports.outputs)
            version, _ = await serving()  # no await between here and the queue: a switch comes before or after
            now = version.entries[entry].ports
            if (now.inputs, now.outputs) == (ports.inputs, ports.outputs):
                break
        tensors = await version.answer(asked.tensors, asked.timeout / 1e6, entry)
        size = sum(len(tensor.data) for tensor in tensors)
        text, length = await beside(size, write_response, entry, str(version.number), asked, ports.outputs, tensors)
    except TooLarge as error:
        raise Refusal(413, str(error)) from None
    except ProtocolError as error:
        raise Refusal(400, str(error)) from None
    except cgbundle.CallError as error:
        raise Refusal(400, one_line(error)) from None
    except Busy as error:
        raise Refusal(429, str(error), error.seconds) from None
    except Stopping as error:
        raise Refusal(503, str(error), 1) from None
    except Late as error:
        raise Refusal(504, str(error)) from None
    except cgbundle.CgbundleError as error:
        if version.failure is not None:
            raise Refusal(503, "the GPU failed, and this server ends", 1) from None
        tell({"event": "failed", "model": entry, "version": version.number, "why": one_line(error)})
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


def body_of(error: str) -> dict[str, str]:
    """An error in the protocol's form."""
    return {"error": error}


async def refused(_: Request, error: Exception) -> Response:
    """The answer to an error."""
    if isinstance(error, Refusal):
        again = {"Retry-After": str(error.again)} if error.again else None
        return JSONResponse({"error": str(error)}, error.status, again)
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)
