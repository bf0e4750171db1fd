"""Waiting threads of a build leave their cores to other processes."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

import cgcompile
from cgcompile.errors import BuildError
from cgcompile_cli.main import app


@pytest.mark.parametrize("policy", ["", "ACTIVE"])
def test_threads_wait_without_spinning_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    if not policy:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    seen = []

    def build(*arguments: object, **options: object) -> None:
        seen.append(os.environ.get("OMP_WAIT_POLICY"))
        raise BuildError("compiler-failed", "enough")

    monkeypatch.setattr(cgcompile, "build", build)
    CliRunner().invoke(app, ["build", "model.py"])
    assert seen == [policy or "PASSIVE"]
