"""The recorded keys that are chosen for a call are those that a brute-force search finds. Refusals give the reason."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgbundle.call import plan as dispatch
from cgbundle.call import plan as unrecorded
from cgbundle.call.plan import Chunk, pieces
from cgbundle.errors import CallError
from cgbundle.format.schema import Dimension
from tests.helpers.bundles.fabricate import dimension
from tests.helpers.raising import raises

recorded = st.sets(st.integers(1, 12), min_size=1, max_size=4).map(lambda sizes: tuple(sorted(sizes)))
policies = st.sampled_from(["pad", "chunk"])
dimensions = st.lists(
    st.builds(lambda sizes, pad, chunk: (sizes, pad, chunk), recorded, st.sampled_from(["rows", "zeros", "no"]), st.booleans()),
    max_size=3,
).map(lambda rows: [dimension(f"d{index}", *sizes, pad=pad, chunk=chunk) for index, (sizes, pad, chunk) in enumerate(rows)])


def cuts(dimension: Dimension, size: int, on_miss: str) -> list[Chunk]:
    return [piece[0] for piece in pieces([dimension], [size], on_miss)]


def best(sizes: tuple[int, ...], size: int, *, exact: bool) -> tuple[int, int] | None:
    """Returns (wasted rows, number of pieces) of the best sum of `sizes` that covers `size`. Tries all sums, first those of few
    pieces."""
    sums, pieces, least_waste = {0}, 0, None
    while pieces < size:
        pieces += 1
        sums = {total + addend for total in sums for addend in sizes if total < size}
        for total in sums:
            if total >= size and not (exact and total > size) and (least_waste is None or (total - size, pieces) < least_waste):
                least_waste = (total - size, pieces)
    return least_waste


@given(dimensions, st.data(), st.sampled_from(["pad", "chunk", "error"]))
def test_pieces_cover_the_call_exactly_once_with_recorded_sizes(dims: list[Dimension], data: st.DataObject, on_miss: str) -> None:
    sizes = [data.draw(st.integers(1, 30)) for _ in dims]
    try:
        parts = pieces(dims, sizes, on_miss)
    except CallError:
        return
    places = [place for piece in parts for place in product(*[range(cut.start, cut.start + cut.length) for cut in piece])]
    assert sorted(places) == sorted(product(*map(range, sizes)))
    for piece in parts:
        assert len(piece) == len(dims)
        for cut, one in zip(piece, dims, strict=True):
            assert cut.size in one.sizes
            assert 0 < cut.length <= cut.size
            assert cut.length == cut.size or one.pad != "no"
            assert one.chunk or (cut.start, cut.length) == (0, sizes[dims.index(one)])


@given(dimensions, st.data(), st.sampled_from(dispatch.POLICIES))
def test_a_recorded_key_is_served_by_itself(dims: list[Dimension], data: st.DataObject, on_miss: str) -> None:
    sizes = [data.draw(st.sampled_from(one.sizes)) for one in dims]
    assert pieces(dims, sizes, on_miss) == (tuple(Chunk(0, size, size) for size in sizes),)


@given(recorded, st.integers(1, 12))
def test_pad_takes_the_smallest_recorded_size_that_holds_the_call(sizes: tuple[int, ...], size: int) -> None:
    for chunk in (True, False):
        if size <= sizes[-1]:
            expected = min(candidate for candidate in sizes if candidate >= size)
            assert cuts(dimension("batch", *sizes, chunk=chunk), size, "pad") == [Chunk(0, size, expected)]


@given(recorded, st.integers(1, 60))
def test_pad_cuts_a_larger_call_into_the_largest_size_and_pads_the_rest(sizes: tuple[int, ...], size: int) -> None:
    largest = sizes[-1]
    if size > largest:
        chunks = cuts(dimension("batch", *sizes), size, "pad")
        assert [cut.size for cut in chunks[:-1]] == [largest] * (len(chunks) - 1)
        assert len(chunks) == -(-size // largest)
        rest = size - largest * (len(chunks) - 1)
        assert chunks[-1] == Chunk(size - rest, rest, min(size for size in sizes if size >= rest))


@settings(max_examples=150, deadline=None)
@given(recorded, st.integers(1, 70))
def test_chunk_wastes_the_fewest_rows_then_takes_the_fewest_pieces(sizes: tuple[int, ...], size: int) -> None:
    chunks = cuts(dimension("batch", *sizes), size, "chunk")
    assert (sum(cut.size for cut in chunks) - size, len(chunks)) == best(sizes, size, exact=False)


@settings(max_examples=150, deadline=None)
@given(recorded, st.integers(1, 70), policies)
def test_a_dimension_that_cannot_be_padded_is_cut_exactly_or_refused(sizes: tuple[int, ...], size: int, on_miss: str) -> None:
    batch = dimension("batch", *sizes, pad="no")
    expected = best(sizes, size, exact=True)
    if expected is None:
        with raises("key-missing"):
            cuts(batch, size, on_miss)
    else:
        chunks = cuts(batch, size, on_miss)
        assert all(cut.length == cut.size for cut in chunks)
        assert (0, len(chunks)) == expected


@pytest.mark.parametrize("sizes", [(7, 11), (4, 6, 9), (1,), (12,), (3, 5, 12)])
def test_calls_far_above_the_largest_size_waste_no_more_than_close_ones(sizes: tuple[int, ...]) -> None:
    """For large calls, a shortcut uses the largest size for most rows. It wastes no more rows than a full search."""
    largest = sizes[-1]
    for size in range(max(1, largest * largest - 3), largest * largest + 2 * largest + 3):
        assert best(sizes, size, exact=False) == (
            sum(cut.size for cut in cuts(dimension("b", *sizes), size, "chunk")) - size,
            len(cuts(dimension("b", *sizes), size, "chunk")),
        )


def test_a_huge_call_is_planned_quickly() -> None:
    chunks = cuts(dimension("batch", 7, 64), 1_000_003, "chunk")
    assert sum(cut.length for cut in chunks) == 1_000_003
    assert sum(cut.size for cut in chunks) == 1_000_003


def test_a_model_without_dimensions_is_one_piece() -> None:
    for on_miss in dispatch.POLICIES:
        assert pieces([], [], on_miss) == ((),)


def test_two_dimensions_are_cut_into_their_product() -> None:
    dims = [dimension("batch", 1, 4), dimension("seq", 8, chunk=False)]
    assert pieces(dims, [5, 6], "pad") == ((Chunk(0, 4, 4), Chunk(0, 6, 8)), (Chunk(4, 1, 1), Chunk(0, 6, 8)))


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(dims: list[Dimension], sizes: list[int], on_miss: str) -> CallError:
    with raises("key-missing") as caught:
        pieces(dims, sizes, on_miss)
    assert "\n" not in str(caught.value)
    return caught.value


@given(dimensions, st.data())
def test_the_error_policy_serves_recorded_keys_only(dims: list[Dimension], data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 14)) for _ in dims]
    if all(size in one.sizes for one, size in zip(dims, sizes, strict=True)):
        assert len(pieces(dims, sizes, "error")) == 1
    else:
        refused(dims, sizes, "error")


def test_the_error_policy_names_the_dimension_its_recorded_sizes_and_what_to_do() -> None:
    error = refused([dimension("batch", 1, 8), dimension("seq", 32, 128)], [8, 50], "error")
    assert str(error) == "seq: expected a recorded seq (32, 128), got 50"
    assert 'on_miss="pad"' in error.hint


def test_the_place_where_a_dimension_shows_can_be_named() -> None:
    with raises("key-missing", match=r"^input 'ids', axis 0 of batch: expected a recorded batch \(1, 8\), got 3$"):
        pieces([dimension("batch", 1, 8)], [3], "error", lambda name: f"input 'ids', axis 0 of {name}")


def test_a_size_that_cannot_be_padded_names_the_dimension_and_the_reason() -> None:
    seq = dimension("seq", 32, 128, pad="no", chunk=False, reason="output 'y' changes by 1.0e-01")
    error = refused([seq], [50], "pad")
    assert str(error) == "seq: expected a recorded seq (32, 128), got 50, and seq cannot be padded"
    why = "seq cannot be padded: output 'y' changes by 1.0e-01"
    assert error.hint == f"build the bundle with seq=50 among its --sizes ({why})", "servers send the message to strangers"


@pytest.mark.parametrize("two_reasons", [True, False])
def test_a_size_that_cannot_be_cut_names_the_dimension_and_why(two_reasons: bool) -> None:
    """Bundles of older versions have one reason for padding and chunks."""
    whole, why = "outputs depend on the padding; verified: padding with zeros changes no result", "outputs depend on the padding"
    reason, not_chunked = (whole, why) if two_reasons else (why, "")
    seq = dimension("seq", 32, 128, pad="zeros", chunk=False, reason=reason, not_chunked=not_chunked)
    error = refused([seq], [200], "pad")
    assert str(error) == "seq: expected at most seq=128, got 200, and a call cannot be chunked along seq"
    why = "a call cannot be chunked along seq: outputs depend on the padding"
    assert error.hint == f"build the bundle with seq=200 among its --sizes, or more ({why})"


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_size_that_no_recorded_sizes_add_up_to_says_so(size: int) -> None:
    batch = dimension("batch", 2, 4, pad="no", chunk=True, reason="a mean over the batch")
    expected = f"batch: expected a sum of recorded batch (2, 4), got {size}, and batch cannot be padded"
    for on_miss in ("pad", "chunk"):
        error = refused([batch], [size], on_miss)
        assert str(error) == expected and "batch cannot be padded: a mean over the batch" in error.hint


def test_a_call_of_too_many_replays_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused([dimension("batch", 1)], [1048577], "pad")
    assert str(error) == "batch: expected at most batch=1048576, 1048576 replays, got 1048577"
    monkeypatch.setattr(unrecorded, "MOST_PIECES", 6)
    batch, rows = dimension("batch", 2, 3), dimension("rows", 1)
    assert len(pieces([batch], [18], "chunk")) == len(pieces([batch, rows], [9, 2], "chunk")) == 6
    assert str(refused([batch], [19], "chunk")) == "batch: expected at most batch=18, 6 replays, got 19"
    assert str(refused([batch, rows], [12, 2], "chunk")) == "the call would take more than 6 replays"


@pytest.mark.parametrize("on_miss", dispatch.POLICIES)
@pytest.mark.parametrize("size", [0, -1])
def test_nothing_to_run_is_refused(on_miss: str, size: int) -> None:
    error = refused([dimension("batch", 1, 4)], [size], on_miss)
    assert str(error) == f"batch: got batch={size}: there is nothing to run"
    assert "sizes" not in error.hint


@pytest.mark.parametrize(
    ("sizes", "size", "expected"), [((7, 10**9), 20, [7, 7, 7]), ((10**9,), 1, [10**9]), ((3, 5, 10**12), 8, [5, 3])]
)
def test_a_large_recorded_size_costs_a_small_call_nothing(sizes: tuple[int, ...], size: int, expected: list[int]) -> None:
    """The planner must not make a table with an entry for every size up to the largest."""
    assert [cut.size for cut in cuts(dimension("d", *sizes), size, "chunk")] == expected


@pytest.mark.parametrize(("pad", "size", "more"), [("zeros", 200, True), ("no", 200, False), ("no", 50, False)])
def test_a_larger_size_helps_only_where_calls_are_padded(pad: str, size: int, more: bool) -> None:
    seq = dimension("seq", 32, 128, pad=pad, chunk=False, reason="a mean")
    assert (f"seq={size} among its --sizes, or more (" in refused([seq], [size], "pad").hint) == more
