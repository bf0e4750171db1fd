"""bundles/cgserve/batching/tracing.py: spans of batched requests, with OpenTelemetry's SDK."""

from __future__ import annotations

import asyncio
import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.fixture
def tracing() -> ModuleType:
    return importlib.import_module("cgserve.batching.tracing")


def two_requests(tracing: ModuleType) -> list[Any]:
    """Returns two requests of one batch, the first of which belongs to a trace."""
    queue = sys.modules["cgserve.batching.request_queue"]

    async def run() -> list[Any]:
        with ThreadPoolExecutor(1) as thread:
            watch = lambda batch: tracing.batch_spans(batch, 4)  # noqa: E731
            async with queue.RequestQueue(lambda items: [2 * item for item in items], thread, 2, 5.0, 9, watch) as request_queue:

                async def ask(item: int, headers: dict[str, str]) -> Any:
                    with tracing.request_span("tiny", 3, headers):
                        return await request_queue.answer(item, "group", 1, 20.0)

                return await asyncio.gather(ask(1, PARENT), ask(2, {}))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def provided() -> Any:
    """Returns the exporter that stores this process's spans; a provider is set once."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="pip install '.[dev]'")
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    memory = importlib.import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    importlib.import_module("opentelemetry.trace").set_tracer_provider(provider)
    return exporter


@pytest.fixture
def exporter(provided: Any) -> Any:
    provided.clear()
    return provided


def posted(tracing: ModuleType, path: str, method: str = "POST") -> list[int]:
    """Returns the statuses of an application that answers in two parts, inside the middleware."""
    sent = list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 429, "headers": []})
        if tracing.trace is not None:
            tracing.trace.get_tracer("test").start_span("inside").end()
        await send({"type": "http.response.body", "body": b"x"})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(name.encode(), value.encode()) for name, value in PARENT.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run(tracing.Traced(app)(scope, None, send))
    return [message["status"] for message in sent if "status" in message]


def test_a_request_of_texts_is_a_span(tracing: ModuleType, exporter: Any) -> None:
    assert posted(tracing, "/v1/embeddings") == [429]
    inside, request = exporter.get_finished_spans()
    assert (inside.name, request.name) == ("inside", "POST /v1/embeddings")
    assert inside.parent.span_id == request.context.span_id and f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    attributes = {"http.request.method": "POST", "url.path": "/v1/embeddings", "http.response.status_code": 429}
    assert dict(request.attributes) == attributes
    exporter.clear()
    assert posted(tracing, "/v1/models", "GET") == [429]
    assert [span.name for span in exporter.get_finished_spans()] == ["inside"]


def test_each_request_has_its_wait_and_its_replay(tracing: ModuleType, exporter: Any) -> None:
    assert two_requests(tracing) == [2, 4]
    spans = exporter.get_finished_spans()
    requests = [span for span in spans if span.name == "infer"]
    assert len(spans) == 6 and len(requests) == 2
    assert [span.parent is not None and f"{span.parent.span_id:016x}" for span in requests].count("b7ad6b7169203331") == 1
    for request in requests:
        assert dict(request.attributes) == {"cgbundle.model": "tiny", "cgbundle.version": 3}
        queue, replay = sorted(
            [span for span in spans if span.parent and span.parent.span_id == request.context.span_id], key=lambda span: span.name
        )
        assert (queue.name, replay.name) == ("queue", "replay") and queue.end_time == replay.start_time
        assert request.start_time <= queue.start_time + 10**6 and replay.end_time <= request.end_time
        assert dict(replay.attributes) == {"cgbundle.rows": 2, "cgbundle.recorded_rows": 4, "cgbundle.requests": 2}


def test_without_the_package_nothing_is_done(tracing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "trace", None)
    assert posted(tracing, "/v1/embeddings") == [429]
    assert two_requests(tracing) == [2, 4]
