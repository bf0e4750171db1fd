"""Spans of requests for OpenTelemetry, if its package is installed: a request, its time in the queue, and its replay.  The tracer
provider of the process exports them: `pip install opentelemetry-distro opentelemetry-exporter-otlp`, then `opentelemetry-instrument
cgcompile serve models`.  Without the package there are no spans.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .request_queue import Batch

try:
    from opentelemetry import propagate, trace
except ImportError:  # the namespace package may exist without the optional package
    trace = None  # type: ignore[assignment]


def request_span(model: str, version: int, headers: Mapping[str, str]) -> AbstractContextManager[Any]:
    """Starts the span of a request, as a child of the span in its headers (traceparent)."""
    if trace is None:
        return nullcontext()
    attributes: dict[str, Any] = {"cgbundle.model": model, "cgbundle.version": version}
    tracer = trace.get_tracer("cgbundle")
    kind = trace.SpanKind.SERVER
    return tracer.start_as_current_span("infer", propagate.extract(headers), kind=kind, attributes=attributes)


class Traced:
    """ASGI middleware: makes a span for each POST, as a child of the span in its headers, until the last byte of its response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if trace is None or scope.get("method") != "POST":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {"http.request.method": "POST", "url.path": scope["path"]}
        tracer, kind = trace.get_tracer("cgbundle"), trace.SpanKind.SERVER
        name = f"POST {scope['path']}"
        with tracer.start_as_current_span(name, propagate.extract(headers), kind=kind, attributes=attributes) as span:

            async def sent(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await self.app(scope, receive, sent)


def batch_spans(batch: Batch, recorded: int) -> None:
    """Adds the spans `queue` and `replay` to every request of an answered batch.  `recorded`: number of computed rows."""
    if trace is None:
        return
    end = time.time_ns()
    began = end - round(batch.seconds * 1e9)
    tracer = trace.get_tracer("cgbundle")
    attributes = {"cgbundle.rows": sum(batch.rows), "cgbundle.recorded_rows": recorded, "cgbundle.requests": len(batch.rows)}
    for context, waited in zip(batch.contexts, batch.waited, strict=True):
        if context.run(trace.get_current_span).is_recording():
            context.run(tracer.start_span, "queue", start_time=began - round(waited * 1e9)).end(began)
            context.run(tracer.start_span, "replay", start_time=began, attributes=attributes).end(end)
