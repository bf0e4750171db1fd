"""What a server of bundles counts, as Prometheus reads it at /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .model_versions import Version, recorded_rows
from .request_queue import Batch

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
OWNER = ("model", "version")


class Metrics:
    """Counters of one server.  Padding's waste is 1 - cgbundle_rows_total / cgbundle_recorded_rows_total."""

    def __init__(self) -> None:
        every = self._registry = CollectorRegistry()
        self.requests = Counter("cgbundle_requests", "Requests by HTTP status.", (*OWNER, "code"), registry=every)
        self.rows = Counter("cgbundle_rows", "Rows of requests that were answered.", OWNER, registry=every)
        self.recorded = Counter(
            "cgbundle_recorded_rows", "Rows that were computed for them: recorded sizes.", OWNER, registry=every
        )
        self.batch = Histogram("cgbundle_batch_rows", "Rows that went together.", OWNER, buckets=ROWS, registry=every)
        self.waited = Histogram("cgbundle_queue_seconds", "How long requests waited.", OWNER, buckets=SECONDS, registry=every)
        self.call = Histogram("cgbundle_call_seconds", "How long replays took.", OWNER, buckets=SECONDS, registry=every)
        self.waiting = Gauge("cgbundle_waiting_requests", "Requests that wait.", OWNER, registry=every)
        self.memory = Gauge("cgbundle_memory_bytes", "Memory of a loaded bundle.", (*OWNER, "memory"), registry=every)
        self.loads = Counter(
            "cgbundle_loads", "Versions that were loaded, by what came of it.", ("model", "result"), registry=every
        )
        self.phases = Gauge("cgbundle_load_seconds", "The last load of a version.", (*OWNER, "phase"), registry=every)

    def watch(self, model: str, version: Version, batch: Batch) -> None:
        """Counts a batch that was answered: a call that failed computed no rows."""
        if batch.failed:
            return
        owner, rows = (model, str(version.number)), sum(batch.rows)
        self.rows.labels(*owner).inc(rows)
        self.recorded.labels(*owner).inc(recorded_rows(rows, version.served.batches))
        self.batch.labels(*owner).observe(rows)
        self.call.labels(*owner).observe(batch.seconds)
        for seconds in batch.waited:
            self.waited.labels(*owner).observe(seconds)

    def text(self, serving: dict[str, Version]) -> bytes:
        """All counts, in Prometheus' format; `serving`: the version of each model."""
        for gauge in (self.waiting, self.memory, self.phases):
            gauge.clear()
        for model, version in serving.items():
            owner = (model, str(version.number))
            self.waiting.labels(*owner).set(version.waiting)
            for memory, size in version.memory.items():
                self.memory.labels(*owner, memory).set(size)
            for phase, seconds in version.seconds.items():
                self.phases.labels(*owner, phase).set(seconds)
        return generate_latest(self._registry)
