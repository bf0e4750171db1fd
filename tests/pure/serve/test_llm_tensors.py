"""bundles/cgserve/language/bundle_model.py: the tensors of a call, from rows of any length."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.places import ROOT

EXAMPLES = ROOT / "examples"
NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6)


@pytest.fixture(scope="module")
def tensors() -> ModuleType:
    """The module, where what it needs is installed."""
    return importlib.import_module("cgserve.language.bundle_model")


@given(st.lists(NUMBERS, max_size=5), st.integers(0, 3), st.sampled_from([0, -1]))
def test_rows_lie_one_below_the_other(tensors: ModuleType, rows: list[list[int]], wider: int, rest: int) -> None:
    width = max([len(row) for row in rows], default=0) + wider
    made = tensors.integers([tuple(row) for row in rows], width, rest)
    assert (made.dtype, made.shape) == ("int64", (len(rows), width))
    assert made.tolist() == [row + [rest] * (width - len(row)) for row in rows]
