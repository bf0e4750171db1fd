"""Replays the self-test of a bundle in a process that imports only the runtime."""

from __future__ import annotations

from pathlib import Path

from cgbundle import self_test


def passed(path: Path) -> None:
    """Asserts that the whole self-test passes without an import of torch."""
    answer = self_test.fresh(str(path))
    assert [row["passed"] for row in answer["results"]] == [True] * len(answer["results"]), answer
    assert answer["results"] and not answer["torch_imported"]
