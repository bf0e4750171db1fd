"""The soak test reports growth only for a lasting slope, not for noise or a peak."""

from __future__ import annotations

from random import Random

import pytest

from tests.soak.growth import LIMITS, MIB, grown, growth, sample

TIMES = [10.0 * number for number in range(1, 181)]


def samples(of: list[float]) -> list[dict[str, int]]:
    return [{"memory": int(value), "descriptors": 12} for value in of]


def test_a_line_grows_by_what_it_rises() -> None:
    assert growth([1, 2, 5], [10, 20, 50]) == pytest.approx(40)
    assert growth([1, 2, 5], [7, 7, 7]) == 0
    assert growth([0, 1, 2, 3, 4], [5, 5, 500, 5, 5]) == 0, "a peak"


def test_noise_is_no_growth_and_a_leak_is() -> None:
    noise = Random(0)
    flat = [300 * MIB + noise.gauss(0, 3 * MIB) for _ in TIMES]
    assert grown(TIMES, samples(flat)) == []
    leaking = [value + 2 * LIMITS["memory"] * time / TIMES[-1] for value, time in zip(flat, TIMES, strict=True)]
    (line,) = grown(TIMES, samples(leaking))
    assert line.startswith("memory grew by ")


def test_what_grows_at_first_is_let_settle() -> None:
    warm = [300 * MIB + min(time, TIMES[-1] / 5) * MIB for time in TIMES]
    assert grown(TIMES, samples(warm)) == []


def test_one_descriptor_a_minute_is_a_leak() -> None:
    samples = [{"memory": MIB, "descriptors": 12 + int(time / 60)} for time in TIMES]
    (line,) = grown(TIMES, samples)
    assert line.startswith("descriptors grew by ")


def test_too_few_samples_say_nothing() -> None:
    assert grown([], []) == []
    assert grown(TIMES[:4], samples([0, 1e12, 2e12, 3e12])) == []


def test_a_process_holds_something() -> None:
    usage = sample(gpu=False)
    assert all(number > 0 for number in usage.values()) and usage.keys() == LIMITS.keys() - {"device"}
