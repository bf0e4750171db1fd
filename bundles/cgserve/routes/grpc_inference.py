"""The Open Inference Protocol over gRPC, for the entries that `inference.Inference` serves over HTTP.

Methods: ServerLive, ServerReady, ServerMetadata, ModelReady, ModelMetadata, ModelInfer, RepositoryIndex and RepositoryModelLoad.
Other methods, such as streams, are UNIMPLEMENTED.  Needs the packages grpcio and protobuf.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ..log import Tell
from ..tensors.entry import Ports
from ..tensors.grpc_messages import CLASSES, SERVICE, read_infer, write_infer, write_metadata
from ..tensors.inference_protocol import Request
from ..transport.access import has_key
from ..transport.receptions import Crowded, Receptions
from .inference import EXTENSIONS, Inference, Refusal, Served, Serving, answered, beside

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT, 404: grpc.StatusCode.NOT_FOUND, 413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED, 500: grpc.StatusCode.INTERNAL, 503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
"""gRPC status by HTTP status."""

TOGETHER = 1024
"""Maximum concurrent calls; gRPC refuses more with RESOURCE_EXHAUSTED."""

OPEN = {"ServerLive", "ServerReady"}
"""Methods that need no key, as over HTTP.  Their empty message is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Address and access of the server.  `largest`: maximum bytes of all messages in progress; one message may have half of it.
    `keys`: if there are any, a call needs one of them.  `certificate` and `private_key`: both in PEM, or both None."""

    host: str
    port: int
    largest: int
    keys: Sequence[bytes] = ()
    certificate: bytes | None = None
    private_key: bytes | None = None


class GrpcInference:
    """The methods of the service."""

    def __init__(self, inference: Inference, largest: int, keys: Sequence[bytes]) -> None:
        self._inference, self._largest, self._keys, self._held = inference, largest, keys, 0
        self._receptions = Receptions()

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns the handler for a server.  The methods are registered as client streams, which look like unary methods to a
        client that sends one message.  So a call begins before its message is read, and only few messages are read at once."""
        methods = {
            "ServerLive": self._live, "ServerReady": self._ready, "ServerMetadata": self._about, "ModelReady": self._model_ready,
            "ModelMetadata": self._model, "ModelInfer": self._infer, "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
        }  # fmt: skip
        handlers = {
            name: grpc.stream_unary_rpc_method_handler(
                partial(self._answer, name, method),
                response_serializer=CLASSES[f"{name}Response"].SerializeToString,
            )
            for name, method in methods.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def _answer(
        self, name: str, method: Callable[[Any, Any], Awaitable[Any]], _messages: AsyncIterator[bytes], context: Any
    ) -> Any:  # fmt: skip
        headers = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        if self._keys and name not in OPEN and not has_key(headers.get("authorization", "").encode(), self._keys):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid key: send authorization: Bearer KEY")
        if name in OPEN:
            return await method(None, headers)
        try:
            data = await self._receptions.receive(context.read)  # `_messages` would keep a reference to the bytes
        except Crowded as crowded:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(crowded))
        if data is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a message is missing")
        size = len(data)
        if self._held + size > self._largest:
            del data  # the error that `abort` raises keeps this frame alive
            await context.abort(grpc.StatusCode.UNAVAILABLE, "all requests together exceed the limit of bytes; retry later")
        self._held += size
        try:
            message = CLASSES[f"{name}Request"].FromString(data)
            del data
            return await method(message, headers)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the message is no {name}Request")
        except Refusal as refusal:
            await context.abort(CODES.get(refusal.status, grpc.StatusCode.UNKNOWN), str(refusal))
        finally:
            self._held -= size

    # --- the methods ----------------------------------------------------------------------------------------------

    async def _live(self, _message: Any, _headers: Any) -> Any:
        return CLASSES["ServerLiveResponse"](live=self._inference.why_not_live() is None)

    async def _ready(self, _message: Any, _headers: Any) -> Any:
        return CLASSES["ServerReadyResponse"](ready=self._inference.why_not_ready() is None)

    async def _about(self, _message: Any, _headers: Any) -> Any:
        extensions = [extension for extension in EXTENSIONS if extension != "binary_tensor_data"]
        return CLASSES["ServerMetadataResponse"](name="cgbundle", version="2", extensions=extensions)

    async def _model_ready(self, message: Any, _headers: Any) -> Any:
        try:
            self._inference.find(message.name, message.version or None)
        except Refusal as refusal:
            if refusal.status != 503:
                raise
            return CLASSES["ModelReadyResponse"](ready=False)
        return CLASSES["ModelReadyResponse"](ready=True)

    async def _model(self, message: Any, _headers: Any) -> Any:
        return write_metadata(self._inference.metadata(message.name, message.version or None))

    async def _index(self, message: Any, _headers: Any) -> Any:
        rows = [row for row in self._inference.index() if row["state"] == "READY" or not message.ready]
        return CLASSES["RepositoryIndexResponse"](models=rows)

    async def _load(self, message: Any, _headers: Any) -> Any:
        await self._inference.load(message.model_name)
        return CLASSES["RepositoryModelLoadResponse"]()

    async def _infer(self, message: Any, headers: Any) -> Any:
        async def call(serving: Callable[[], Awaitable[Serving]], tell: Tell) -> Any:
            def read(ports: Ports) -> Awaitable[Request]:
                return beside(message.ByteSize(), read_infer, message, ports.inputs, ports.outputs)

            def write(served: Served) -> Awaitable[Any]:
                return beside(served.size, write_infer, served.entry, served.number, served.request, served.outputs, served.tensors)

            return await answered(serving, read, write, tell)

        return await self._inference.answer(message.model_name, message.model_version or None, headers, call)


@asynccontextmanager
async def grpc_server(inference: Inference, listening: Listening, stopping: float) -> AsyncIterator[str]:
    """Serves during the block, and yields the URL.  At the end no more calls are accepted, and running ones have `stopping`
    seconds.  Raises OSError if the address cannot be used."""
    service = GrpcInference(inference, listening.largest, listening.keys)
    # A message of 60 MB took 475 MB, because gRPC, protobuf and the answer hold copies (measured with grpcio 1.85).
    options = [("grpc.max_receive_message_length", listening.largest // 2), ("grpc.so_reuseport", 0), ("grpc.http2.bdp_probe", 0)]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=TOGETHER)
    server.add_generic_rpc_handlers((service.handler(),))
    host = f"[{listening.host}]" if ":" in listening.host else listening.host
    try:
        if listening.certificate is not None and listening.private_key is not None:
            identity = grpc.ssl_server_credentials([(listening.private_key, listening.certificate)])
            port = server.add_secure_port(f"{host}:{listening.port}", identity)
        else:
            port = server.add_insecure_port(f"{host}:{listening.port}")
    except RuntimeError:  # grpc gives no reason
        raise OSError(f"{listening.host}:{listening.port}: gRPC cannot listen there: is the port taken?") from None
    await server.start()
    try:
        yield f"grpc{'s' if listening.certificate else ''}://{host}:{port}"
    finally:
        await server.stop(stopping)
