"""A CPU bundle of a stock causal language model, whose cache is an input and an output."""

from __future__ import annotations

from pathlib import Path

import pytest

import cgcompile
from tests.helpers.models import record_checks as checks


def test_a_step_of_a_causal_language_model_takes_and_gives_its_cache(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    built = cgcompile.build(
        checks.causal(), checks.step, sizes={"batch": [2], "past": [6]}, out=tmp_path / "step.cgb", target="cpu"
    )
    checks.check_step(built.path, "cpu", batch=2, past=6)
