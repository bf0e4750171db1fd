"""The Open Inference Protocol (KServe's v2, as in Triton's clients) over HTTP, for the entries of all bundles of a server.

GET /v2, /v2/health/live, /v2/health/ready, /v2/models/M[/versions/V][/ready]; POST /v2/models/M[/versions/V]/infer,
/v2/repository/index, /v2/repository/models/M/load (check the folder now).  M is a model, or M.ENTRY if its bundle has several
entries.  Tensors are JSON or binary data.  Errors are {"error": "..."}: 400 invalid, 404 not found, 413 too large (also more than 4
MiB of JSON), 429 with Retry-After if too many requests wait, 503 with Retry-After if no version serves yet or all bodies together
are too large, 504 after the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

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
from ..tensors.entry import Ports
from ..tensors.inference_protocol import Port, ProtocolError, TensorData, TooLarge, metadata, read_request, write_response
from ..tensors.inference_protocol import Request as InferRequest
from ..tensors.metrics import Metrics
from ..transport.unknown_paths import text_of

HEADER = "Inference-Header-Content-Length"
EXTENSIONS = ["binary_tensor_data", "model_repository"]

Serving = tuple[Version, str]
"""A version and the name of one of its entries."""

Answer = TypeVar("Answer")


class Refusal(Exception):
    """An error response: its HTTP status, its text, and the seconds until a retry (0: never)."""

    def __init__(self, status: int, text: str, retry_after: int = 0) -> None:
        super().__init__(text)
        self.status, self.retry_after = status, retry_after


class Inference:
    """The routes below /v2.  `health`: why the server cannot work, or None; `ready`: why it is not ready yet, or None."""

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
        if why := self.why_not_live():
            raise Refusal(503, why)
        return JSONResponse({"live": True})

    async def _ready(self, _: Request) -> Response:
        if why := self.why_not_ready():
            raise Refusal(503, why)
        return JSONResponse({"ready": True})

    async def _model_ready(self, request: Request) -> Response:
        self.find(*_model_and_version(request))
        return JSONResponse({"ready": True})

    async def _model(self, request: Request) -> Response:
        return JSONResponse(self.metadata(*_model_and_version(request)))

    async def _index(self, _: Request) -> Response:
        return JSONResponse(self.index())

    async def _load(self, request: Request) -> Response:
        await self.load(request.path_params["model"])
        return JSONResponse({})

    # --- for HTTP and gRPC ------------------------------------------------------------------------------------

    def why_not_live(self) -> str | None:
        """Returns why the server cannot work, or None."""
        return self._health()

    def why_not_ready(self) -> str | None:
        """Returns why the server is not ready, or None."""
        return self._health() or self._why_not_ready()

    def metadata(self, name: str, wanted: str | None) -> dict[str, Any]:
        """Returns the metadata of an entry, as `inference_protocol.metadata`.  Raises Refusal."""
        version, entry = self.entry(name, wanted)
        ports = version.entries[entry].ports
        return metadata(entry, [str(version.number)], ports.inputs, ports.outputs, ports.sizes)

    def index(self) -> list[dict[str, str]]:
        """Returns every entry that serves, and every refused version."""
        rows: list[dict[str, str]] = []
        for name, model in self._repository.models.items():
            if model.current is not None:
                number = str(model.current.number)
                rows += [{"name": entry, "version": number, "state": "READY", "reason": ""} for entry in model.current.names]
            for refused_number, (_identity, why) in model.refused.items():
                rows.append({"name": name, "version": str(refused_number), "state": "UNAVAILABLE", "reason": str(why)})
        return rows

    async def load(self, name: str) -> None:
        """Checks for new versions now.  Raises Refusal if then no version of the model serves."""
        await self._repository.refresh()
        self.find(name, None)

    async def answer(
        self, name: str, wanted: str | None, headers: Mapping[str, str],
        call: Callable[[Callable[[], Awaitable[Serving]], Tell], Awaitable[Answer]],
    ) -> Answer:  # fmt: skip
        """Awaits `call` in a span, counts the request, and returns the result.  The first argument of `call` is a function that
        returns the version that serves.  Raises Refusal."""
        version, entry = self.entry(name, wanted)

        async def serving() -> Serving:
            nonlocal version
            version, _ = self.entry(name, wanted)
            return version, entry

        code = 499  # the client disconnected
        try:
            with request_span(entry, version.number, headers):
                answer = await call(serving, self._tell)
            code = 200
            return answer
        except Refusal as refusal:
            code = refusal.status
            raise
        finally:
            self._metrics.requests.labels(entry, str(version.number), str(code)).inc()

    async def _infer(self, request: Request) -> Response:
        body = await request.body()
        return await self.answer(
            *_model_and_version(request), request.headers, lambda serving, tell: infer(serving, request, body, tell)
        )

    def entry(self, name: str, wanted: str | None) -> Serving:
        """Returns the version that serves a model, and the entry; `wanted`: the required number.  Raises Refusal."""
        version = self.find(name, wanted)
        if version.language is not None:
            raise Refusal(400, f"{name!r} is a language model: POST to /v1/chat/completions or /v1/completions")
        if name not in version.entries:
            raise Refusal(404, f"{name!r} has several entries, each of which is a model: {', '.join(version.entries)}")
        return version, name

    def find(self, name: str, wanted: str | None) -> Version:
        """Returns the version that serves a model; `wanted`: the required number.  Raises Refusal."""
        models = self._repository.models
        model = models.get(name) or models.get(name.rpartition(".")[0])
        if model is None or (name not in models and model.current is not None and name not in model.current.names):
            names = sorted([entry for version in self._repository.serving() for entry in version.names])
            raise Refusal(404, f"no model {name!r}; there are {', '.join(names) or 'none'}")
        if model.current is None:
            raise Refusal(503, f"no version of {name!r} serves", 1)
        if wanted is not None and wanted != str(model.current.number):
            raise Refusal(404, f"version {wanted!r} of {name!r} does not serve; version {model.current.number} does")
        return model.current


def _model_and_version(request: Request) -> tuple[str, str | None]:
    return request.path_params["model"], request.path_params.get("version")


async def infer(serving: Callable[[], Awaitable[Serving]], request: Request, body: bytes, tell: Tell) -> Response:
    """Answers an inference request with the body `body`, using the version that `serving` returns.  Raises Refusal."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "Content-Encoding: compressed bodies are not supported")
    header = request.headers.get(HEADER)

    def read(ports: Ports) -> Awaitable[InferRequest]:
        return beside(len(body), read_request, body, header, ports.inputs, ports.outputs)

    def write(served: Served) -> Awaitable[tuple[bytes, int | None]]:
        return beside(served.size, write_response, served.entry, served.number, served.request, served.outputs, served.tensors)

    text, length = await answered(serving, read, write, tell)
    if length is None:
        return Response(text, media_type="application/json")
    return Response(text, media_type="application/octet-stream", headers={HEADER: str(length)})


@dataclass(frozen=True, slots=True)
class Served:
    """The results of a call: its entry, the version's number, the request, the outputs' ports, and their tensors."""

    entry: str
    number: str
    request: InferRequest
    outputs: Sequence[Port]
    tensors: Sequence[TensorData]

    @property
    def size(self) -> int:
        return sum(len(tensor.data) for tensor in self.tensors)


async def answered(
    serving: Callable[[], Awaitable[Serving]], read: Callable[[Ports], Awaitable[InferRequest]],
    write: Callable[[Served], Awaitable[Answer]], tell: Tell,
) -> Answer:  # fmt: skip
    """Reads the inputs with `read`, calls the model, and returns the result of `write`.  Raises Refusal."""
    version, entry = await serving()
    try:
        while True:
            ports = version.entries[entry].ports
            request = await read(ports)
            version, _ = await serving()  # no await between here and the queue, so the version cannot change
            new_ports = version.entries[entry].ports
            if (new_ports.inputs, new_ports.outputs) == (ports.inputs, ports.outputs):
                break
        tensors = await version.answer(request.tensors, request.timeout / 1e6, entry)
        return await write(Served(entry, str(version.number), request, ports.outputs, tensors))
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


SMALL = 64 << 10
"""Maximum bytes that are converted in the event loop; a thread converts more, so that other requests are not blocked."""

BESIDE = ThreadPoolExecutor(1, "json")
"""One thread, because the parser holds the GIL, and several threads would block the event loop in turns."""


async def beside(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function, in another thread if it processes many bytes, and returns its result."""
    if size <= SMALL:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(BESIDE, function, *arguments)


def body_of(error: str) -> dict[str, str]:
    """Returns an error in the protocol's format."""
    return {"error": error}


async def refused(request: Request, error: Exception) -> Response:
    if isinstance(error, Refusal):
        headers = {"Retry-After": str(error.retry_after)} if error.retry_after else None
        return JSONResponse({"error": str(error)}, error.status, headers)
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": text_of(request, error)}, error.status_code, error.headers)
