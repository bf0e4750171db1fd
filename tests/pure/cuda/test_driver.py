"""The messages for errors of the driver."""

from __future__ import annotations

import pytest

from cgbundle.cuda import driver
from tests.helpers.raising import raises


def test_a_failed_assertion_says_what_it_may_be_and_what_is_left_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        driver, "_name", lambda error: {driver.ASSERT: "CUDA_ERROR_ASSERT", 700: "CUDA_ERROR_ILLEGAL_ADDRESS"}[error]
    )
    with raises(
        "driver-failed", match="^cuStreamSynchronize: CUDA_ERROR_ASSERT: an index is out of range, or an assertion .* failed"
    ) as caught:
        driver.check("cuStreamSynchronize", driver.ASSERT)
    assert caught.value.hint.startswith("start a new process: ")
    with raises("driver-failed", match="^cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS$"):
        driver.check("cuStreamSynchronize", 700)
