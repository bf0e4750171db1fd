"""Which lowering an int_key gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgcompile.pipeline.best.choice import ALIKE, LOWERINGS, Times, choose

MICROSECONDS = st.floats(0.5, 1e6, allow_nan=False)


@st.composite
def tried(draw: st.DrawFn) -> dict[tuple[int, ...], Times]:
    """Draws times of some keys, all with the same lowerings."""
    names = draw(st.lists(st.sampled_from(LOWERINGS), min_size=1, unique=True))
    keys = draw(st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True))
    graphs = draw(st.integers(1, 3))
    return {(key,): {name: tuple(draw(st.lists(MICROSECONDS, min_size=graphs, max_size=graphs))) for name in names} for key in keys}


@given(tried())
def test_nothing_is_slower_than_the_fastest_by_more_than_the_noise(times: dict[tuple[int, ...], Times]) -> None:
    for key, name in choose(times).items():
        assert sum(times[key][name]) <= (1 + ALIKE) * min(map(sum, times[key].values()))


@given(tried())
def test_the_order_in_which_they_were_tried_does_not_matter(times: dict[tuple[int, ...], Times]) -> None:
    turned = {key: dict(reversed(time.items())) for key, time in times.items()}
    assert choose(turned) == choose(times)


@given(tried(), st.data())
def test_a_pair_that_cannot_be_in_one_bundle_is_not_and_costs_least(
    times: dict[tuple[int, ...], Times], data: st.DataObject
) -> None:
    names = sorted(next(iter(times.values())))
    if len(names) < 2:
        return
    pair = frozenset(data.draw(st.lists(st.sampled_from(names), min_size=2, max_size=2, unique=True)))
    chosen = choose(times, [pair])
    assert not pair <= set(chosen.values())
    free = choose(times)
    if not pair <= set(free.values()):
        assert chosen == free
    taken = sum(sum(times[key][name]) for key, name in chosen.items())
    for gone in pair:
        least = sum(min(sum(timings) for name, timings in time.items() if name != gone) for time in times.values())
        assert taken <= (1 + ALIKE) * least * 1.0001


def test_the_simpler_of_two_within_the_noise() -> None:
    assert choose({(1,): {"max-autotune": (100.0,), "cross-compile": (100.9,), "eager": (101.5,)}}) == {(1,): "cross-compile"}
    assert choose({(1,): {"max-autotune": (100.0,), "eager": (100.9,)}}) == {(1,): "eager"}
    assert choose({(1,): {"max-autotune": (100.0,), "eager": (101.1,)}}) == {(1,): "max-autotune"}


def test_graphs_of_a_key_are_chosen_together() -> None:
    assert choose({(1,): {"eager": (10.0, 60.0), "inductor": (30.0, 30.0)}}) == {(1,): "inductor"}


@pytest.mark.parametrize("slow", [9.0, 11.0])
def test_of_a_conflict_the_one_goes_that_is_missed_least(slow: float) -> None:
    times = {(1,): {"eager": (1.0,), "cross-compile": (slow,)}, (2,): {"eager": (11.0,), "cross-compile": (1.0,)}}
    assert set(choose(times, [frozenset(("eager", "cross-compile"))]).values()) == {"cross-compile" if slow == 9.0 else "eager"}
