"""The server as one ASGI application: OpenAI's protocol below /v1, the Open Inference Protocol at /v2; paths, health, metrics."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .batching.request_queue import Batch
from .batching.tracing import Traced, batch_spans
from .language.completions import Refusal as OpenAIRefusal
from .language.metrics import LanguageFamilies, LanguageMetrics
from .language.served_model import ServedModel
from .log import Event, Tell, one_line
from .models.model_repository import Found, Repository
from .models.version import Watch
from .routes import index, inference, openai
from .routes import texts as texts_routes
from .routes.dashboards import Dashboards
from .settings import ServeError, Settings
from .tensors.entry import Ports, recorded_rows
from .tensors.metrics import Metrics
from .text.text_model import TextModel
from .transport.access import KeyRequired, Numbered
from .transport.limits import BoundedBodies

STOPPING = 120
"""Maximum seconds for open requests when the server ends: a long answer takes minutes."""


class Counters(Watch):
    """Counts the work of models as metrics and spans."""

    def __init__(self) -> None:
        self.registry, self.dashboards = CollectorRegistry(), CollectorRegistry()
        self.tensors, self.languages = Metrics(self.registry), LanguageFamilies(self.registry)
        self.dashboards.register(Dashboards(self.registry))

    def batch(self, model: str, version: int, ports: Ports, batch: Batch) -> None:
        self.tensors.watch(model, version, ports, batch)
        batch_spans(batch, recorded_rows(sum(batch.rows), ports.batches))

    def language(self, model: str) -> LanguageMetrics:
        return self.languages.of(model)


class Paths:
    """Dispatches a request by the beginning of its path to one of three ASGI applications."""

    def __init__(self, texts: ASGIApp, tensors: ASGIApp, rest: ASGIApp) -> None:
        """`rest` gets all other requests, and the lifespan events."""
        self._texts, self._tensors, self._rest = texts, tensors, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith("/v1/") or path in openai.OUTSIDE or path in texts_routes.OUTSIDE:
            await self._texts(scope, receive, send)
        elif path == "/v2" or path.startswith("/v2/"):
            await self._tensors(scope, receive, send)
        else:
            await self._rest(scope, receive, send)


class Application:
    """`app`: an ASGI application.  `failure`: why the server ended by itself, or None.  `stop`: called when that happens."""

    def __init__(
        self, look: Callable[[], Found], settings: Settings, tell: Tell, keys: Sequence[bytes] = (), *, essential: bool = False
    ) -> None:
        """`look` finds the bundles.  `essential`: the server ends if it cannot serve the first bundle that it finds."""
        self.failure: ServeError | None = None
        self.stop: Callable[[], None] = lambda: None
        self.counters = Counters()
        self._settings, self._tell, self._essential, self._keys = settings, tell, essential, keys
        self.repository = Repository(look, settings.options, settings.poll, self.counters, self._on_event)
        self._openai = openai.OpenAI(
            self._languages, self._text_models, lambda: self.repository.models, self._count_refused, settings.adapter_root
        )
        self._texts = texts_routes.Texts(self._text_models, self._which_serve, self._openai.reader, self._on_event)
        self._inference = inference.Inference(
            self.repository, self.counters.tensors, self._on_event, self._failure_reason, self._why_not_ready
        )
        self.app = self._with_middleware(Paths(*self._parts()), keys)

    def _parts(self) -> tuple[Starlette, Starlette, Starlette]:
        """Returns the applications for texts, for tensors, and for health and metrics."""
        error_handlers = {OpenAIRefusal: openai.refused, HTTPException: openai.refused}
        limits = Middleware(BoundedBodies, largest=openai.BYTES, form=openai.body_of, together=openai.TOGETHER)
        routes = [*self._texts.routes, *self._openai.routes]
        texts = Starlette(routes=routes, middleware=[Middleware(Traced), limits], exception_handlers=error_handlers)
        largest = self._settings.largest
        limits = Middleware(BoundedBodies, largest=largest, form=inference.body_of, together=largest)
        handlers = {inference.Refusal: inference.refused, HTTPException: inference.refused}
        tensors = Starlette(routes=self._inference.routes, middleware=[limits], exception_handlers=handlers)
        plain = [Route("/", self._index), Route("/health", self._health), Route("/metrics", self._metrics)]
        return texts, tensors, Starlette(routes=plain, exception_handlers=handlers, lifespan=self._lifespan)

    def _with_middleware(self, app: ASGIApp, keys: Sequence[bytes]) -> ASGIApp:
        """Adds request ids, and API keys and CORS if they are configured."""
        if keys:
            app = KeyRequired(app, keys)
        if self._settings.origins:
            exposed = ["X-Request-Id", "Retry-After", inference.HEADER]
            allowed: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": exposed}
            app = CORSMiddleware(app, allow_origins=list(self._settings.origins), **allowed)
        return Numbered(app)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self.repository, self._grpc():
            watching = asyncio.create_task(self._watch())
            yield
            watching.cancel()

    @asynccontextmanager
    async def _grpc(self) -> AsyncIterator[None]:
        """Serves gRPC during the block, if configured."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            if settings.grpc_port is not None:
                from .routes.grpc_inference import Listening, grpc_server  # here, because the extra `grpc` may not be installed

                pems = [path.read_bytes() if path else None for path in (settings.certificate, settings.private_key)]
                listening = Listening(
                    host=settings.host, port=settings.grpc_port, largest=settings.largest, keys=self._keys, certificate=pems[0],
                    private_key=pems[1],
                )  # fmt: skip
                try:
                    url = await stack.enter_async_context(grpc_server(self._inference, listening, STOPPING))
                    self._tell({"event": "listening", "url": url})
                except OSError as error:
                    self._end(ServeError(str(error), "give another --grpc-port; 0 takes a free one, which is shown"))
            yield

    async def _watch(self) -> None:
        """Ends the server within a second after its GPU has failed, even if nobody asks for its health."""
        while True:
            await asyncio.sleep(1.0)
            self._failure_reason()

    # --- models --------------------------------------------------------------------------------------------------------

    def _languages(self) -> dict[str, ServedModel]:
        return {version.model: version.language for version in self.repository.serving() if version.language is not None}

    def _text_models(self) -> dict[str, TextModel]:
        return {version.model: version.text for version in self.repository.serving() if version.text is not None}

    def _which_serve(self) -> dict[str, bool]:
        return {name: model.current is not None for name, model in list(self.repository.models.items())}

    def _count_refused(self, path: str, code: int) -> None:
        self.counters.languages.requests.labels("", path, str(code)).inc()

    def _on_event(self, event: Event) -> None:
        """Logs and counts an event.  Ends an `essential` server if a bundle is refused and no version serves.  A text log omits
        this event: the command prints the same error."""
        final = event["event"] == "refused" and self._essential and not any(self.repository.serving())
        if not final or self._settings.log != "text":
            self._tell(event)
        if event["event"] in ("serving", "refused"):
            self.counters.tensors.loads.labels(event["model"], event["event"]).inc()
        if final:
            self._end(ServeError(event["why"], event.get("hint", "") or "cgcompile verify BUNDLE --run"))

    def _end(self, failure: ServeError) -> None:
        if self.failure is None:
            self.failure = failure
            self.stop()

    # --- paths and health ----------------------------------------------------------------------------------------------

    async def _index(self, _: Request) -> Response:
        refused = {
            f"{name} {number}": str(why)
            for name, model in self.repository.models.items()
            for number, (_, why) in model.refused.items()
        }
        text = json.dumps(index.index(self.repository.serving(), refused), indent=2)
        return Response(f"{text}\n", media_type="application/json")  # indented: people read it

    def _failure_reason(self) -> str | None:
        """Returns why the server cannot work: its GPU failed, or the thread that calls a model has ended.  Else returns None."""
        for version in self.repository.serving():
            if version.failure is not None:
                why = one_line(version.failure)
                if self.failure is None:
                    self._tell({"event": "gpu-failed", "model": version.model, "version": version.number, "why": why})
                    self._end(ServeError(f"the GPU failed: {why}", "start the server again: this process has lost the GPU"))
                return why
            if version.language is not None and not version.language.engine.alive:
                return f"the engine of {version.model} has ended"
        return None

    def _why_not_ready(self) -> str | None:
        models = self.repository.models
        missing = [name for name, model in models.items() if model.current is None]
        if not self.repository.looked:
            return "the models are being loaded"
        if self._settings.ready == "all" and missing:
            return f"no version serves of {', '.join(sorted(missing))}"
        return None if len(missing) < len(models) else "no model serves"

    async def _health(self, _: Request) -> Response:
        failure = self._failure_reason()
        models: dict[str, Any] = {}
        for version in self.repository.serving():
            report: dict[str, Any] = {"version": version.number}
            if version.language is not None:
                engine = version.language.engine
                state = engine.state
                report |= {
                    "alive": engine.alive, "running": state.running, "waiting": state.waiting, "pages_used": state.pages_used,
                    "pages_free": state.pages_free,
                }  # fmt: skip
            else:
                report["waiting"] = sum(entry.waiting for entry in version.entries.values())
            models[version.model] = report
        report = {
            "live": failure is None,
            "ready": not failure and not self._why_not_ready(),
            "torch": "torch" in sys.modules,
            "models": models,
        }
        return JSONResponse(report, 200 if failure is None else 503)

    async def _metrics(self, _: Request) -> Response:
        self.counters.tensors.forget_versions()
        for version in self.repository.serving():
            self.counters.tensors.show(version.model, version.number, version.entries, version.memory, version.seconds)
            if version.language is not None:
                version.language.metrics.show(version.language.engine.state)
        text = generate_latest(self.counters.registry) + generate_latest(self.counters.dashboards)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
