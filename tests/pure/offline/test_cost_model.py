"""A configuration is chosen by the table first, then by similar problems, then by the cost model, and it always fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgcompile.offline.tuning.cost_model import Candidate, Problem, choose, cost, fits, measured, nearest, shared_bytes
from cgcompile.targets.architectures import ARCHES, arch

H200 = arch("sm_90")


def candidate(m: int, n: int, k: int, stages: int = 3, warps: int = 4) -> Candidate:
    return Candidate(block_m=m, block_n=n, block_k=k, stages=stages, warps=warps, group=8)


def problem(m: int, n: int, k: int, dtype: str = "bfloat16", batch: int = 1, kind: str = "mm") -> Problem:
    return Problem(kind=kind, batch=batch, m=m, n=n, k=k, dtype=dtype, arch="sm_90")


OFFERED = (
    candidate(16, 32, 64, 4, 2),
    candidate(32, 32, 64, 2, 4),
    candidate(64, 64, 32, 3, 4),
    candidate(128, 128, 32, 3, 8),
    candidate(128, 128, 64, 4, 8),
)

sizes = st.integers(1, 1 << 15)
powers = st.sampled_from([16, 32, 64, 128, 256])
candidates = st.builds(
    Candidate, block_m=powers, block_n=powers, block_k=powers, stages=st.integers(1, 5), warps=st.sampled_from([1, 2, 4, 8]),
    group=st.just(8),
)  # fmt: skip
problems = st.builds(
    Problem, kind=st.just("mm"), batch=st.integers(1, 4096), m=sizes, n=sizes, k=sizes,
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64", "int8"]), arch=st.just("sm_90"),
)  # fmt: skip


@given(problems, st.lists(candidates, min_size=1, max_size=20), st.sampled_from(ARCHES))
def test_the_chosen_candidate_fits(asked: Problem, offered: list[Candidate], target) -> None:
    if not any(fits(asked, one, target) for one in offered):
        with pytest.raises(ValueError, match=target.name):
            choose(asked, offered, target)
        return
    index, how = choose(asked, offered, target)
    assert shared_bytes(asked, offered[index]) <= target.shared_optin
    assert how == ("only" if len(offered) == 1 else "heuristic")
    assert all(cost(asked, offered[index], target) <= cost(asked, one, target) for one in offered if fits(asked, one, target))


@given(problems, st.permutations(OFFERED))
def test_order_of_candidates_does_not_matter(asked: Problem, offered: list[Candidate]) -> None:
    best = offered[choose(asked, offered, H200)[0]]
    assert cost(asked, best, H200) == cost(asked, OFFERED[choose(asked, OFFERED, H200)[0]], H200)


def test_only_one_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="sm_86"):
        choose(problem(512, 512, 512, "float32"), [candidate(128, 128, 64, 4, 8)], arch("sm_86"))


def test_size_of_blocks_follows_the_problem() -> None:
    small, large = choose(problem(8, 768, 768), OFFERED, H200)[0], choose(problem(8192, 8192, 4096), OFFERED, H200)[0]
    assert OFFERED[small].block_m <= 32
    assert OFFERED[large].block_m == OFFERED[large].block_n == 128 and OFFERED[large].warps == 8


def test_a_partial_wave_costs_a_whole_one() -> None:
    full, one_more = problem(64 * 132, 64, 512), problem(64 * 132 * 40 + 1, 64, 512)
    one = candidate(64, 64, 32, 3, 4)
    assert cost(one_more, one, H200) > cost(full, one, H200)
    assert cost(replace(full, m=1), one, H200) == cost(replace(full, m=64), one, H200)  # unused rows cost as much


def test_table() -> None:
    asked = problem(64, 768, 768)
    slow, fast = OFFERED[2], OFFERED[4]
    table = {asked: ((slow, 9.0), (fast, 5.0), (candidate(256, 256, 64), 1.0))}
    assert choose(asked, OFFERED, H200, table) == (4, "table")
    assert choose(asked, OFFERED[:4], H200, table) == (2, "table")  # the fastest configuration of the table is not offered


def test_nearest() -> None:
    asked = problem(100, 768, 768)
    near, far = problem(128, 768, 768), problem(256, 768, 768)
    table = {far: ((OFFERED[0], 1.0),), near: ((OFFERED[3], 1.0),)}
    assert choose(asked, OFFERED, H200, table) == (3, "nearest")
    assert choose(asked, OFFERED[:3], H200, table) == (0, "nearest")


UNLIKE = {
    "far": problem(1000, 768, 768),
    "dtype": problem(100, 768, 768, "float32"),
    "kind": problem(100, 768, 768, kind="conv"),
    "batch": problem(100, 768, 768, batch=5),
}


@pytest.mark.parametrize("other", UNLIKE.values(), ids=UNLIKE)
def test_unlike_problems_say_nothing(other: Problem) -> None:
    asked = problem(100, 768, 768)
    assert choose(asked, OFFERED, H200, {other: ((OFFERED[4], 1.0),)}) == choose(asked, OFFERED, H200)
    assert choose(asked, OFFERED, H200)[1] == "heuristic"


@pytest.mark.parametrize("other", [{"kind": "addmm"}, {"dtype": "float16"}, {"kind": "addmm", "dtype": "float16"}])
def test_kinds_and_dtypes_that_run_alike_serve_each_other_after_the_problem_itself(other: dict[str, str]) -> None:
    asked = problem(100, 768, 768)
    like = replace(asked, **other)
    assert choose(asked, OFFERED, H200, {like: ((OFFERED[4], 1.0),)}) == (4, "nearest")
    both = [(like, ((OFFERED[4], 1.0),)), (asked, ((OFFERED[3], 2.0),))]
    for rows in (dict(both), dict(reversed(both))):
        assert choose(asked, OFFERED, H200, rows) == (3, "table")
        assert nearest(asked, rows)[0] == asked


def test_what_was_measured_may_be_taken_though_inductor_does_not_offer_it() -> None:
    asked, wide, tall = problem(2048, 3072, 768), candidate(128, 256, 64, 3, 8), candidate(256, 128, 64, 3, 8)
    table = {asked: ((wide, 1.0), (tall, 2.0))}
    assert measured(asked, table) == [wide, tall]
    assert measured(problem(2048, 2304, 768), table) == [wide, tall]  # measurements of the nearest problem
    assert measured(problem(2048, 128, 3072), {problem(2048, 256, 3072): table[asked]}) == [tall]  # not wider than the problem
    assert measured(problem(8, 16, 32), table) == []
    also = [*OFFERED, *measured(asked, table)]
    assert also[choose(asked, also, H200, table)[0]] == wide
