"""bundles/cgserve/language/lane_tables.py: tensors that calls use again equal tensors that are written anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cgbundle.tensors.tensor import empty
from cgserve.language.bundle_model import BundleModel
from cgserve.language.lane_tables import LaneTables
from cgserve.scheduling.requests import Lane, Sampling, Step

BATCH, BLOCKS = 4, 6
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.5, top_k=3, top_p=0.9, penalty=1.5, seed=(1 << 32) - 1, alternatives=2),
)
CALLS = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans()), max_size=BATCH, unique_by=lambda lane: lane[0]),
    max_size=12,
)
"""The lanes of every call: the number of a text, how many pages were added to it, and whether the text was started again."""


def columns(tables: LaneTables, counts: list[int]) -> dict[str, Any]:
    """Returns the values that a call reads: of the tokens of a prefill's lanes only the valid ones."""
    ids = [row[:count] for row, count in zip(tables.ids.tensor.tolist(), [*counts, *[1] * (BATCH - len(counts))], strict=True)]
    others = {name: getattr(tables, name).tensor.tolist() for name in ("count", "start", "slot", "adapter", "pages", "stop")}
    return others | {name: column.tensor.tolist() for name, column in tables.sampling.items()} | {"ids": ids}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([1, 3]), CALLS)
def test_tables_that_stay_are_as_new_ones(seq: int, calls: list[list[tuple[int, int, bool]]]) -> None:
    tables, texts = LaneTables(BATCH, seq, BLOCKS), dict[int, list[int]]()
    for turn, drawn in enumerate(calls):
        lanes = []
        for number, more, anew in drawn:
            pages = texts[number] = [] if anew or number not in texts else texts[number]
            pages += [100 * turn + 10 * number + page for page in range(min(more, BLOCKS - len(pages)))]
            ids, stop = tuple(range(turn, turn + 1 + number % seq)), tuple(range(number))
            rules: Any = None if (turn + number) % 3 else object()
            lanes.append(
                Lane(number, ids, 7 * turn, pages, 1 + number, 1, stop, SAMPLINGS[number % 2], 5 + number, -1, rules, number % 3)
            )
        fresh, counts = LaneTables(BATCH, seq, BLOCKS), [len(lane.ids) for lane in lanes]
        tables.fill(lanes)
        fresh.fill(lanes)
        assert columns(tables, counts) == columns(fresh, counts)
        for row, lane in enumerate(lanes):
            assert tables.pages.tensor.tolist()[row] == [*lane.pages, *[0] * (BLOCKS - len(lane.pages))]
            assert tables.sampling["deferred"].tensor.tolist()[row] == (lane.rules is not None)
            assert tables.count.tensor.tolist()[row] == counts[row] and tables.slot.tensor.tolist()[row] == lane.slot


def test_a_call_reads_its_inputs_while_the_next_one_is_prepared() -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def entry(**sizes: int) -> Any:
        def call(ids: Any, _: Any, start: Any, *__: Any) -> Any:
            seen.append((start.tolist(), [row[0] for row in ids.tolist()]))
            token = empty("int64", (2,))
            token[(slice(0, 2),)] = start
            return {"token": token, "logprob": empty("float32", (2,))}

        call.int_keys, call.inputs, call.outputs = (tuple(sizes.values()),), [], []  # type: ignore[attr-defined]
        call.spec = SimpleNamespace(dimensions=[SimpleNamespace(name=name) for name in sizes])  # type: ignore[attr-defined]
        return call

    weights = [SimpleNamespace(name="keys_0", shape=(9, 1, 4, 1)), SimpleNamespace(name="seen", shape=(3, 10))]
    entries = {"prefill": entry(batch=1, seq=4, blocks=4), "decode": entry(batch=2, blocks=4)}
    model = BundleModel(SimpleNamespace(entries=entries, manifest=SimpleNamespace(weights=weights)), 1)  # type: ignore[arg-type]

    def step(number: int) -> Step:
        lane = Lane("a", (0,), 10 * number, [1, 2], 1, 1, (), SAMPLINGS[0], 0, 0 if number else -1)
        return Step("decode", (lane,))

    waiting, before = model.prepare(step(0)), None
    for number in range(1, 6):
        following = model.prepare(step(number))
        before = waiting(before)
        waiting = following
    assert seen == [([10 * number, 0], [10 * max(0, number - 1), 0]) for number in range(5)]
