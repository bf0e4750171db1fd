"""Metrics of language models, in Prometheus' format at /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ..scheduling.requests import Step
from .engine import State

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
LANES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GAUGES = {
    "running": "Requests that are served.", "waiting": "Requests that wait.", "pages_used": "Pages of the cache in use.",
    "pages_free": "Pages of the cache that are free.", "preempted": "Requests that gave their pages back before their end.",
    "shared": "Tokens of equal beginnings that were not read again.",
}  # fmt: skip
"""Texts of the gauges, by fields of State."""


class LanguageFamilies:
    """The metrics of all language models of a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"cgbundle_llm_{name}", text, ("model", *labels), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"cgbundle_llm_{name}", text, ("model", *labels), buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests by HTTP status.", "path", "code")
        self.prompt = counter("prompt_tokens", "Tokens of prompts.")
        self.generated = counter("generated_tokens", "Tokens that were made.")
        self.first = histogram("first_token_seconds", "Seconds to the first text of a request.", SECONDS)
        self.whole = histogram("request_seconds", "Seconds to the end of a request.", SECONDS)
        self.calls = histogram("call_seconds", "Calls of the model.", SECONDS, "entry")
        self.lanes = histogram("call_lanes", "Lanes of a call: requests, or pieces of prompts.", LANES, "entry")
        self.gauges = {name: Gauge(f"cgbundle_llm_{name}", text, ("model",), registry=registry) for name, text in GAUGES.items()}

    def of(self, model: str) -> LanguageMetrics:
        return LanguageMetrics(self, model)


class LanguageMetrics:
    """The metrics of one language model."""

    def __init__(self, families: LanguageFamilies, model: str) -> None:
        self._families, self._model = families, model
        self.prompt, self.generated = families.prompt.labels(model), families.generated.labels(model)
        self.first, self.whole = families.first.labels(model), families.whole.labels(model)

    def answered(self, path: str, code: int) -> None:
        self._families.requests.labels(self._model, path, str(code)).inc()

    def watch(self, step: Step, seconds: float) -> None:
        self._families.calls.labels(self._model, step.entry).observe(seconds)
        self._families.lanes.labels(self._model, step.entry).observe(len(step.lanes))

    def show(self, state: State) -> None:
        for name, gauge in self._families.gauges.items():
            gauge.labels(self._model).set(getattr(state, name))
