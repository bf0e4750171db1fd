"""The CUDA driver that is not there: every test here leaves nothing on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.fake_driver import FakeDriver, install


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver()
    install(monkeypatch, made)
    yield made
    assert not made.live
    assert made.retained == 0
