"""The server's metrics under the names that dashboards of vLLM and Triton use.

All values are derived from the registry's metrics.  Metrics that this server does not have are omitted.  Sources of the names:
vLLM's docs/design/metrics.md, Triton's docs/user_guide/metrics.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

VLLM = {
    "cgbundle_llm_running": ("vllm:num_requests_running", "gauge"),
    "cgbundle_llm_waiting": ("vllm:num_requests_waiting", "gauge"),
    "cgbundle_llm_preempted": ("vllm:num_preemptions", "counter"),
    "cgbundle_llm_shared": ("vllm:prefix_cache_hits", "counter"),
    "cgbundle_llm_prompt_tokens": ("vllm:prompt_tokens", "counter"),
    "cgbundle_llm_generated_tokens": ("vllm:generation_tokens", "counter"),
    "cgbundle_llm_first_token_seconds": ("vllm:time_to_first_token_seconds", "histogram"),
    "cgbundle_llm_request_seconds": ("vllm:e2e_request_latency_seconds", "histogram"),
}
"""Our metric families, with vLLM's name and type; the label `model` becomes `model_name`."""


class TritonNumber(NamedTuple):
    """A metric of Triton: the sum of our samples, times `unit`.  `succeeded`: True counts requests with status 200, False the
    others; None for samples without a status."""

    name: str
    sample: str
    unit: float = 1.0
    succeeded: bool | None = None


TRITON = (
    TritonNumber("nv_inference_request_success", "cgbundle_requests_total", succeeded=True),
    TritonNumber("nv_inference_request_failure", "cgbundle_requests_total", succeeded=False),
    TritonNumber("nv_inference_count", "cgbundle_rows_total"),
    TritonNumber("nv_inference_exec_count", "cgbundle_call_seconds_count"),
    TritonNumber("nv_inference_queue_duration_us", "cgbundle_queue_seconds_sum", unit=1e6),
    TritonNumber("nv_inference_compute_infer_duration_us", "cgbundle_call_seconds_sum", unit=1e6),
    TritonNumber("nv_inference_pending_request_count", "cgbundle_waiting_requests"),
)
"""By model and version.  Their type is `unknown`, because Triton's counters lack the suffix `_total`."""


class Dashboards(Collector):
    """A Prometheus collector that derives its metrics from `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        metrics = list(self._registry.collect())
        yield from (_renamed(metric, *VLLM[metric.name]) for metric in metrics if metric.name in VLLM)
        yield _cache_use(metrics)
        for number in TRITON:
            yield _triton(metrics, number)


def _renamed(metric: Metric, name: str, kind: str) -> Metric:
    renamed = Metric(name, metric.documentation, kind)
    for sample in metric.samples:
        suffix = sample.name.removeprefix(metric.name) or ("_total" if kind == "counter" else "")
        if not suffix.endswith("_created"):
            labels = {"model_name" if label == "model" else label: value for label, value in sample.labels.items()}
            renamed.add_sample(name + suffix, labels, sample.value)
    return renamed


def _cache_use(metrics: Iterable[Metric]) -> Metric:
    """Returns the fraction of the cache's pages in use."""
    pages: dict[str, dict[str, float]] = defaultdict(dict)
    for metric in metrics:
        if metric.name in ("cgbundle_llm_pages_used", "cgbundle_llm_pages_free"):
            for sample in metric.samples:
                pages[sample.labels["model"]][metric.name.rpartition("_")[2]] = sample.value
    use = Metric("vllm:kv_cache_usage_perc", "Part of the cache's pages in use; 1 is all.", "gauge")
    for model, counts in pages.items():
        if len(counts) == 2 and any(counts.values()):
            use.add_sample(use.name, {"model_name": model}, counts["used"] / (counts["used"] + counts["free"]))
    return use


def _triton(metrics: Iterable[Metric], number: TritonNumber) -> Metric:
    values: dict[tuple[str, str], float] = defaultdict(float)
    for metric in metrics:
        for sample in metric.samples:
            counts = number.succeeded in (None, sample.labels.get("code") == "200")
            if sample.name == number.sample and counts:
                values[sample.labels["model"], sample.labels["version"]] += sample.value * number.unit
    shown = Metric(number.name, f"{number.sample} under Triton's name.", "unknown")
    for (model, version), value in values.items():
        shown.add_sample(number.name, {"model": model, "version": version}, value)
    return shown
