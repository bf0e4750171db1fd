"""Metrics of the server under the names of vLLM and Triton, as a Prometheus parser reads them."""

from __future__ import annotations

from typing import Any

import pytest

prometheus_client = pytest.importorskip("prometheus_client", reason="pip install '.[serve]'")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from cgserve.language.engine import State  # noqa: E402
from cgserve.language.metrics import LanguageFamilies  # noqa: E402
from cgserve.routes.dashboards import Dashboards  # noqa: E402
from cgserve.tensors.metrics import Metrics  # noqa: E402


def read(registry: Any) -> dict[tuple[str, ...], float]:
    """Returns values by the sample's name and the values of its labels."""
    shown = prometheus_client.CollectorRegistry()
    shown.register(Dashboards(registry))
    families = text_string_to_metric_families(prometheus_client.generate_latest(shown).decode())
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_a_language_model_is_shown_as_vllm_shows_it() -> None:
    registry = prometheus_client.CollectorRegistry()
    metrics = LanguageFamilies(registry).of("qwen")
    metrics.prompt.inc(7)
    metrics.generated.inc(3)
    metrics.first.observe(0.25)
    metrics.whole.observe(2.5)
    metrics.show(State(running=2, waiting=5, pages_used=30, pages_free=90, preempted=4, shared=16))
    samples = read(registry)
    assert {name[0] for name in samples if not name[0].endswith("_bucket")} == {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total", "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count",
        "vllm:time_to_first_token_seconds_sum", "vllm:e2e_request_latency_seconds_count", "vllm:e2e_request_latency_seconds_sum",
        "vllm:kv_cache_usage_perc",
    }  # fmt: skip
    for name, value in {
        "num_requests_running": 2, "num_requests_waiting": 5, "num_preemptions_total": 4, "prefix_cache_hits_total": 16,
        "prompt_tokens_total": 7, "generation_tokens_total": 3, "time_to_first_token_seconds_sum": 0.25,
        "e2e_request_latency_seconds_count": 1, "kv_cache_usage_perc": 0.25,
    }.items():  # fmt: skip
        assert samples[f"vllm:{name}", "qwen"] == value
    assert samples["vllm:time_to_first_token_seconds_bucket", "0.5", "qwen"] == 1


def test_a_model_of_tensors_is_shown_as_triton_shows_it() -> None:
    registry = prometheus_client.CollectorRegistry()
    metrics = Metrics(registry)
    for code, count in (("200", 3), ("400", 1), ("429", 2)):
        metrics.requests.labels("tiny", "1", code).inc(count)
    metrics.rows.labels("tiny", "1").inc(12)
    metrics.waited.labels("tiny", "1").observe(0.5)
    for seconds in (0.25, 0.5):
        metrics.call.labels("tiny", "1").observe(seconds)
    metrics.waiting.labels("tiny", "1").set(6)
    assert read(registry) == {
        ("nv_inference_request_success", "tiny", "1"): 3, ("nv_inference_request_failure", "tiny", "1"): 3,
        ("nv_inference_count", "tiny", "1"): 12, ("nv_inference_exec_count", "tiny", "1"): 2,
        ("nv_inference_queue_duration_us", "tiny", "1"): 5e5, ("nv_inference_compute_infer_duration_us", "tiny", "1"): 7.5e5,
        ("nv_inference_pending_request_count", "tiny", "1"): 6,
    }  # fmt: skip
