"""A product is split only into equal parts, and only where measurements or the cost model show a gain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgcompile.offline.tuning.cost_model import Candidate, Problem, Table, cost, fits
from cgcompile.offline.tuning.split_factors import (
    CLOCK,
    LAUNCH,
    READ,
    SHORTEST,
    SPLIT_FACTORS,
    TILES,
    WORTH,
    split_factor,
    split_problem,
)
from cgcompile.targets.architectures import ARCHES, Arch, arch

H200 = arch("sm_90")
TILE = Candidate(block_m=16, block_n=32, block_k=128, stages=4, warps=4, group=8)


def problem(m: int, n: int, k: int, dtype: str = "bfloat16", kind: str = "mm") -> Problem:
    return Problem(kind=kind, batch=1, m=m, n=n, k=k, dtype=dtype, arch="sm_90")


def table(times: dict[Problem, float]) -> Table:
    """Returns a table: for each problem a candidate with this time, and a slower one that must not be used."""
    slower = replace(TILE, stages=1)
    return {known: [(TILE, time), (slower, 100 * time)] for known, time in times.items()}


def measured(whole: Problem, times: dict[int, float]) -> Table:
    """Returns a table from `times`: split factor -> microseconds."""
    return table({split_problem(whole, cut): time for cut, time in times.items()})


def reading(known: Problem, cut: int) -> float:
    """Returns the microseconds of the additional kernel that sums the parts: it reads `cut` float32 results of m x n."""
    return 0.0 if cut == 1 else LAUNCH + 4 * cut * known.m * known.n / READ * 1e6


def estimated(whole: Problem, cut: int, target: Arch) -> float:
    """Returns microseconds by the cost model: of the best tile that fits (else the first one), plus `reading`."""
    wanted = split_problem(whole, cut)
    tiles = [tile for tile in TILES if fits(wanted, tile, target)] or TILES[:1]
    return min(cost(wanted, tile, target) for tile in tiles) / CLOCK * 1e6 + reading(whole, cut)


def allowed(whole: Problem, cut: int) -> bool:
    """Returns whether a split is allowed: all parts have the same number of complete blocks of 16 elements, and are long enough."""
    return cut in SPLIT_FACTORS and whole.k % cut == 0 and (whole.k // cut) % 16 == 0 and whole.k // cut >= SHORTEST


problems = st.builds(
    problem,
    m=st.integers(1, 4096), n=st.integers(1, 1 << 15),
    k=st.one_of(st.integers(1, 1 << 14), st.integers(1, 1024).map(lambda n: 16 * n), st.integers(6, 14).map(lambda n: 1 << n)),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]), kind=st.sampled_from(["mm", "addmm"]),
)  # fmt: skip


# --- by the model of cost -----------------------------------------------------------------------------------------


@given(problems, st.sampled_from(ARCHES))
def test_a_cut_divides_the_inner_axis_and_pays(whole: Problem, target: Arch) -> None:
    cut = split_factor(whole, target)
    times = {1: estimated(whole, 1, target)} | {
        factor: estimated(whole, factor, target) for factor in SPLIT_FACTORS if allowed(whole, factor)
    }
    assert cut == 1 or allowed(whole, cut)
    assert times[cut] <= times[1]
    if cut > 1:
        assert times[cut] < WORTH * times[1] and times[cut] == min(times.values())
    else:
        assert min(times.values()) >= WORTH * times[1], "a cut that pays was left out"


@given(problems.filter(lambda whole: not any(allowed(whole, cut) for cut in SPLIT_FACTORS)), st.sampled_from(ARCHES))
def test_what_cannot_be_cut_stays_whole(whole: Problem, target: Arch) -> None:
    assert split_factor(whole, target) == 1
    assert split_factor(whole, target, measured(whole, {1: 100.0, 2: 1.0, 4: 1.0, 8: 1.0})) == 1


def test_a_narrow_product_is_cut_and_a_wide_one_is_not() -> None:
    """8 rows fill a few of 132 multiprocessors; 4096 x 4096 fill all of them many times."""
    assert split_factor(problem(8, 64, 8192), H200) > 1
    assert split_factor(problem(4096, 4096, 8192), H200) == 1


@pytest.mark.parametrize(("k", "most"), [(64, 1), (127, 1), (128, 2), (144, 1), (160, 2), (256, 4), (512, 8), (1040, 1)])
def test_pieces_are_whole_blocks_and_not_too_short(k: int, most: int) -> None:
    """In the measurements more parts are always faster. So the largest factor that k allows is used."""
    whole = problem(16, 16, k)
    assert split_factor(whole, H200, measured(whole, {1: 1000.0, 2: 500.0, 4: 250.0, 8: 125.0})) == most


# --- by measurements ----------------------------------------------------------------------------------------------


@given(st.fixed_dictionaries({1: st.floats(1, 100)}, optional={cut: st.floats(1, 100) for cut in SPLIT_FACTORS}))
def test_measurements_of_the_problem_decide(times: dict[int, float]) -> None:
    whole = problem(32, 768, 3072)
    cut = split_factor(whole, H200, measured(whole, times))
    if len(times) == 1:
        assert cut == split_factor(whole, H200), "nothing to compare with: the model of cost"
        return
    total = {factor: time + reading(whole, factor) for factor, time in times.items()}
    best = min(total, key=lambda factor: total[factor])
    assert total[cut] <= total[1]
    assert cut in ((1, best) if total[best] < WORTH * total[1] else (1,))
    if total[best] < WORTH * total[1]:
        assert total[cut] == total[best]


def test_a_cut_must_be_worth_it() -> None:
    whole = problem(16, 16, 4096)
    enough = 100.0 * WORTH - reading(whole, 2)
    assert split_factor(whole, H200, measured(whole, {1: 100.0, 2: enough - 0.1})) == 2
    assert split_factor(whole, H200, measured(whole, {1: 100.0, 2: enough + 0.1})) == 1


def test_reading_the_sums_counts() -> None:
    """The sums of two parts of 4096 x 4096 are 134 MB of float32, which must be read."""
    whole = problem(4096, 4096, 4096)
    assert reading(whole, 2) > 60
    assert split_factor(whole, H200, measured(whole, {1: 100.0, 2: 60.0})) == 1


def test_the_nearest_measured_problem_decides() -> None:
    asked, near, far = problem(32, 768, 3072), problem(32, 1024, 3072), problem(48, 2048, 3072)
    times = {**measured(near, {1: 10.0, 4: 2.0}), **measured(far, {1: 10.0, 8: 2.0})}
    assert split_factor(asked, H200, times) == 4
    assert split_factor(far, H200, times) == 8


def test_a_neighbour_without_both_measurements_is_passed_over() -> None:
    asked, near, far = problem(32, 768, 3072), problem(32, 1024, 3072), problem(48, 2048, 3072)
    assert split_factor(asked, H200, {**measured(near, {1: 10.0}), **measured(far, {1: 10.0, 8: 2.0})}) == 8
    assert split_factor(asked, H200, {**measured(near, {4: 1.0}), **measured(far, {1: 10.0, 8: 2.0})}) == 8


def test_a_like_problem_serves_after_the_problem_itself() -> None:
    """A problem with a bias, or of the other half precision, takes the same time. A problem's own measurements come first."""
    asked = problem(32, 768, 3072)
    for like in (replace(asked, kind="addmm"), replace(asked, dtype="float16")):
        slow, fast = measured(like, {1: 100.0, 2: 4.9}), measured(asked, {1: 5.0, 2: 4.9})
        assert split_factor(asked, H200, slow) == 2
        for both in ({**slow, **fast}, {**fast, **slow}):
            assert split_factor(asked, H200, both) == 1, "one more kernel costs more than the part saves"


@pytest.mark.parametrize("other", [{"kind": "conv"}, {"dtype": "float32"}, {"arch": "sm_80"}, {"m": 32 * 8}])
def test_measurements_of_something_else_are_not_used(other: dict[str, object]) -> None:
    asked = problem(32, 768, 3072)
    unlike = replace(asked, **other)  # type: ignore[arg-type]
    by_model = split_factor(asked, H200)
    for cut in SPLIT_FACTORS:
        if cut != by_model:
            assert split_factor(asked, H200, measured(unlike, {1: 100.0, cut: 0.01})) == by_model


def test_the_neighbours_cut_must_divide_this_problem_too() -> None:
    asked, near = problem(32, 768, 3088), problem(32, 768, 3072)  # 3088 = 16 * 193
    assert split_factor(asked, H200, measured(near, {1: 100.0, 2: 1.0})) == 1


@pytest.mark.parametrize("cut", SPLIT_FACTORS)
def test_the_pieces_are_a_batched_product_of_the_same_work(cut: int) -> None:
    whole = problem(32, 768, 3072, kind="addmm")
    batched = split_problem(whole, cut)
    assert (batched.kind, batched.batch, batched.m, batched.n, batched.batch * batched.k) == ("bmm", cut, 32, 768, 3072)
    assert split_problem(whole, 1) is whole
