"""Shared by tests without torch: quick property tests, and a fake CUDA driver."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.drivers.fake_driver import FakeDriver, install

# the machine may be busy: no test may fail for the time it took
settings.register_profile("pure", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pure")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Yields the driver that the runtime finds. Checks that the test leaves no objects on it."""
    driver = FakeDriver()
    install(monkeypatch, driver)
    yield driver
    if driver.live or driver.retained:
        gc.collect()  # frees sessions and programs that the test dropped
    assert not driver.live
    assert driver.retained == 0
