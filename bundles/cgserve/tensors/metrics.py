"""Metrics of a server of bundles, in Prometheus' format at /metrics."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ..batching.request_queue import Batch
from .entry import Ports, TensorEntry, recorded_rows

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
OWNER = ("model", "version")


class Metrics:
    """Metrics of all entries of one server.  The fraction of padding is 1 - cgbundle_rows_total / cgbundle_recorded_rows_total."""

    def __init__(self, every: CollectorRegistry) -> None:
        self.requests = Counter("cgbundle_requests", "Requests by HTTP status.", (*OWNER, "code"), registry=every)
        self.rows = Counter("cgbundle_rows", "Rows of requests that were answered.", OWNER, registry=every)
        self.recorded = Counter(
            "cgbundle_recorded_rows", "Computed rows of answered requests, with padding.", OWNER, registry=every
        )
        self.batch = Histogram("cgbundle_batch_rows", "Rows of a call.", OWNER, buckets=ROWS, registry=every)
        self.waited = Histogram("cgbundle_queue_seconds", "How long requests waited.", OWNER, buckets=SECONDS, registry=every)
        self.call = Histogram("cgbundle_call_seconds", "How long replays took.", OWNER, buckets=SECONDS, registry=every)
        self.waiting = Gauge("cgbundle_waiting_requests", "Requests that wait.", OWNER, registry=every)
        self.memory = Gauge("cgbundle_memory_bytes", "Memory of a loaded bundle.", (*OWNER, "memory"), registry=every)
        self.loads = Counter("cgbundle_loads", "Loads of versions, by result.", ("model", "result"), registry=every)
        self.phases = Gauge("cgbundle_load_seconds", "The last load of a version.", (*OWNER, "phase"), registry=every)

    def watch(self, model: str, version: int, ports: Ports, batch: Batch) -> None:
        """Counts an answered batch; a failed call computed no rows."""
        if batch.failed:
            return
        owner, rows = (model, str(version)), sum(batch.rows)
        self.rows.labels(*owner).inc(rows)
        self.recorded.labels(*owner).inc(recorded_rows(rows, ports.batches))
        self.batch.labels(*owner).observe(rows)
        self.call.labels(*owner).observe(batch.seconds)
        for seconds in batch.waited:
            self.waited.labels(*owner).observe(seconds)

    def forget_versions(self) -> None:
        """Clears the gauges of all versions.  Call `show` afterwards for each version that serves."""
        for gauge in (self.waiting, self.memory, self.phases):
            gauge.clear()

    def show(
        self, model: str, version: int, entries: Mapping[str, TensorEntry], memory: Mapping[str, int], seconds: Mapping[str, float]
    ) -> None:
        """Sets the gauges of a version of a model; `entries`: by their served names."""
        for name, entry in entries.items():
            self.waiting.labels(name, str(version)).set(entry.waiting)
        for kind, size in memory.items():
            self.memory.labels(model, str(version), kind).set(size)
        for phase, value in seconds.items():
            self.phases.labels(model, str(version), phase).set(value)
