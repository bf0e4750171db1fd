"""The stored self-test of a bundle, replayed by a process with the runtime alone."""

from __future__ import annotations

from pathlib import Path

from cgbundle import self_test


def passed(path: Path) -> None:
    """All of it passes, and torch was not imported."""
    answer = self_test.fresh(str(path))
    assert [row["passed"] for row in answer["results"]] == [True] * len(answer["results"]), answer
    assert answer["results"] and not answer["torch_imported"]
