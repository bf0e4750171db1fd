"""What tests without torch share: quick property tests, and a CUDA driver that is not there."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.drivers.fake_driver import FakeDriver, install

# the machine may be busy: nothing fails for the time that it took
settings.register_profile("pure", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pure")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """The driver that the runtime finds; a test leaves nothing on it."""
    driver = FakeDriver()
    install(monkeypatch, driver)
    yield driver
    if driver.live or driver.retained:
        gc.collect()  # sessions and programs that were forgotten
    assert not driver.live
    assert driver.retained == 0
