"""Paths of the repository and of the golden bundles."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"

BUILT_WITH = (2, 13)
"""The torch version that built the CPU goldens; their code runs with this version and later ones."""


def skip_older_torch() -> None:
    """Skips a test that runs a CPU golden if torch is older than BUILT_WITH."""
    if tuple([int(part) for part in version("torch").split(".")[:2]]) < BUILT_WITH:
        pytest.skip(f"torch {version('torch')} is older than the one that the goldens were built with")
