"""What people see of torch's warnings: nothing about its own insides."""

from __future__ import annotations

import warnings

import torch

import cgcompile


def test_an_lstm_is_exported_without_a_word_about_its_attributes() -> None:
    """torch (2.11, 2.13) warned of `_flat_weights`, three times, in the name of contextlib."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = torch.nn.LSTM(4, 6, batch_first=True).eval()
        cgcompile.check(model, lambda batch: torch.rand(batch, 5, 4), sizes=[2, 8], target="cpu")
    assert [str(each.message) for each in seen if "during export" in str(each.message)] == []
