"""Users see no warnings about torch's internals."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

import cgcompile
from cgcompile.pipeline.api import TRACE, with_torch
from cgcompile.util.progress import silent


def test_an_lstm_is_exported_without_a_word_about_its_attributes() -> None:
    """torch (2.11, 2.13) warned about `_flat_weights` three times, from contextlib."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = torch.nn.LSTM(4, 6, batch_first=True).eval()
        cgcompile.check(model, lambda batch: torch.rand(batch, 5, 4), sizes=[2, 8], target="cpu")
    assert [str(warning.message) for warning in seen if "during export" in str(warning.message)] == []


def test_torch_prints_no_graph_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's trace handler removes itself when it receives the first record."""
    from torch._logging._internal import LazyTraceHandler, trace_structured

    monkeypatch.delenv("TORCH_LOGS", raising=False)
    monkeypatch.setattr(logging.getLogger(TRACE), "handlers", [LazyTraceHandler(None)])
    printed: list[str] = []
    with with_torch(silent, "torch"):
        for _ in range(3):
            trace_structured("artifact", payload_fn=lambda: printed.append("graph"))
    assert len(printed) <= 1
