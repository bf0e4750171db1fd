"""What a server of a language model counts, as Prometheus reads it at /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .engine import State
from .scheduler import Step

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
LANES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        every = self._registry = CollectorRegistry()
        self.requests = Counter("cgbundle_llm_requests", "Requests by HTTP status.", ("path", "code"), registry=every)
        self.prompt = Counter("cgbundle_llm_prompt_tokens", "Tokens of prompts.", registry=every)
        self.made = Counter("cgbundle_llm_generated_tokens", "Tokens that were made.", registry=every)
        self.first = Histogram("cgbundle_llm_first_token_seconds", "To a request's first text.", buckets=SECONDS, registry=every)
        self.whole = Histogram("cgbundle_llm_request_seconds", "To a request's end.", buckets=SECONDS, registry=every)
        self._calls = Histogram("cgbundle_llm_call_seconds", "Calls of the model.", ("entry",), buckets=SECONDS, registry=every)
        self._lanes = Histogram("cgbundle_llm_call_lanes", "Requests in a call.", ("entry",), buckets=LANES, registry=every)
        gauges = {
            "running": "Requests that are served.", "waiting": "Requests that wait.", "pages_used": "Pages of the cache in use.",
            "pages_free": "Pages of the cache that are free.", "preempted": "Requests that gave their pages back before their end.",
        }  # fmt: skip
        self._gauges = {name: Gauge(f"cgbundle_llm_{name}", text, registry=every) for name, text in gauges.items()}

    def watch(self, step: Step, seconds: float) -> None:
        """Counts a call."""
        self._calls.labels(step.entry).observe(seconds)
        self._lanes.labels(step.entry).observe(len(step.lanes))

    def text(self, state: State) -> bytes:
        """All counts, in Prometheus' format."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(state, name))
        return generate_latest(self._registry)
