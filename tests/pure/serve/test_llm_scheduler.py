"""bundles/cgserve/language/scheduler.py: whatever comes and goes, pages and lanes have one owner, and everybody is served."""

from __future__ import annotations

import importlib
import random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.places import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def scheduling() -> ModuleType:
    """The module, where what it needs is installed."""
    return importlib.import_module("cgserve.language.scheduler")


class World:
    """A scheduler, a model that continues every text in a way of its own, and a check of every step.

    `cache` holds what the pages would: of each (page, place) the text's key and the number of the token.
    """

    def __init__(self, scheduling: ModuleType, limits: Any) -> None:
        self.scheduling, self.limits = scheduling, limits
        self.scheduler = scheduling.Scheduler(limits)
        self.cache: dict[tuple[int, int], tuple[object, int]] = {}
        self.slots: dict[int, object] = {}
        self.requests: dict[object, Any] = {}
        self.every: dict[object, Any] = {}  # those that ended or left among them
        self.made: dict[object, list[int]] = {}
        self.ended: dict[object, str] = {}
        self.entries: list[str] = []

    def add(self, key: object, prompt: int, most: int, stop: int = -1, **sampling: int) -> None:
        tokens = tuple([hash((key, place)) % 1000 for place in range(prompt)])
        sampled = self.scheduling.Sampling(**sampling)
        request = self.scheduling.Request(prompt=tokens, most=most, stop=(stop,) if stop >= 0 else (), sampling=sampled)
        self.scheduler.add(key, request)
        self.requests[key] = self.every[key] = request
        self.made[key] = []

    def cancel(self, key: object) -> None:
        self.scheduler.cancel(key)
        self.requests.pop(key, None)

    def step(self) -> bool:
        """One call; False where nothing is open."""
        step = self.scheduler.next()
        if step is None:
            return False
        self.check(step)
        self.entries.append(step.entry)
        for progress in self.scheduler.finish(step, [self.run(lane, step.entry) for lane in step.lanes]):
            assert progress.key in self.requests
            self.made[progress.key] += [token.id for token in progress.tokens]
            if progress.reason is not None:
                self.ended[progress.key] = progress.reason
                del self.requests[progress.key]
        return True

    def check(self, step: Any) -> None:
        limits, lanes = self.limits, step.lanes
        assert 1 <= len(lanes) <= {"prefill": limits.readers, "decode": limits.lanes, "generate": limits.loop_lanes}[step.entry]
        assert len({lane.key for lane in lanes}) == len(lanes), "a request with two lanes"
        pages, slots = [page for lane in lanes for page in lane.pages], [lane.slot for lane in lanes]
        assert len(set(pages)) == len(pages) and len(set(slots)) == len(slots), "a page or slot with two owners"
        assert all(0 < page < limits.pages for page in pages) and all(0 < slot < limits.slots for slot in slots)
        for lane in lanes:
            assert 1 <= len(lane.ids) <= (limits.chunk if step.entry == "prefill" else 1)
            assert 1 <= lane.most <= (limits.turns if step.entry == "generate" else 1)
            assert lane.start + len(lane.ids) + lane.most - 1 <= len(lane.pages) * limits.page
            assert len(lane.pages) <= limits.blocks
            assert step.entry == "prefill" or lane.start > 0, "a text begins with a prefill, which empties the slot"

    def run(self, lane: Any, entry: str) -> list[Any]:
        """Reads the text back from the pages, as attention would, and continues it."""
        if lane.start == 0:
            self.slots[lane.slot] = lane.key
        assert self.slots[lane.slot] == lane.key, "a slot that another text wrote"
        text = [self._read(lane, place) for place in range(lane.start)]
        for token in lane.ids:
            self._write(lane, len(text), token)
            text.append(token)
        request = self.requests[lane.key]
        known = [*request.prompt, *self.made[lane.key]]
        assert text == known[: len(text)], "the pages hold another text than this"
        made = []
        for _ in range(lane.most):
            made.append(following(text))
            if made[-1] in lane.stop or len(made) == lane.most:
                break
            self._write(lane, len(text), made[-1])
            text.append(made[-1])
        return [self.scheduling.Token(token, 0.0) for token in made]

    def _place(self, lane: Any, place: int) -> tuple[int, int]:
        return lane.pages[place // self.limits.page], place % self.limits.page

    def _write(self, lane: Any, place: int, token: int) -> None:
        self.cache[self._place(lane, place)] = lane.key, token

    def _read(self, lane: Any, place: int) -> int:
        key, token = self.cache[self._place(lane, place)]
        assert key == lane.key, "a page that another text wrote"
        return token

    def check_empty(self) -> None:
        scheduler, limits = self.scheduler, self.limits
        assert scheduler.next() is None and scheduler.running == scheduler.waiting == 0
        assert scheduler.pages.taken == scheduler.slots.taken == 0, "a leak"
        assert sorted(scheduler.pages.take(limits.pages - 1)) == list(range(1, limits.pages))
        assert sorted(scheduler.slots.take(limits.slots - 1)) == list(range(1, limits.slots))


def following(text: list[int]) -> int:
    """The token behind a text: what a model at temperature 0 is."""
    return hash(tuple(text)) % 1000


def continued(prompt: tuple[int, ...], most: int, stop: tuple[int, ...]) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + most and not (len(text) > len(prompt) and text[-1] in stop):
        text.append(following(text))
    return text[len(prompt) :]


LIMITS = st.fixed_dictionaries(
    {
        "page": st.integers(1, 4), "pages": st.integers(2, 14), "slots": st.integers(2, 6), "blocks": st.integers(1, 8),
        "readers": st.integers(1, 3), "chunk": st.integers(1, 6), "lanes": st.integers(1, 4), "loop_lanes": st.integers(0, 4),
        "turns": st.integers(1, 5),
    }
).filter(lambda each: min(each["blocks"], each["pages"] - 1) * each["page"] >= 2)  # fmt: skip
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 10**6)),
        st.tuples(st.just("step")),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(limits=LIMITS, events=EVENTS)
def test_any_order_of_coming_and_going(scheduling: ModuleType, limits: dict[str, int], events: list[tuple[Any, ...]]) -> None:
    world = World(scheduling, scheduling.Limits(**limits))
    context, wanted = world.limits.context, {}
    for number, (what, *rest) in enumerate(events):
        if what == "add":
            prompt = 1 + rest[0] % (context - 1)
            most = 1 + rest[1] % (context - prompt)
            stop = -1
            if rest[2] == 0:  # a token that comes
                tokens = tuple([hash((number, place)) % 1000 for place in range(prompt)])
                stop = continued(tokens, most, ())[rest[1] % most]
            world.add(number, prompt, most, stop, alternatives=int(rest[2] == 1))
            request = world.requests[number]
            wanted[number] = continued(request.prompt, request.most, request.stop)
        elif what == "cancel" and world.requests:
            key = sorted(world.requests)[rest[0] % len(world.requests)]
            world.cancel(key)
            wanted.pop(key, None)
        else:
            world.step()
    steps = 0
    while world.step():
        steps += 1
        assert steps < 200 * (1 + len(events)), "it goes on for ever"
    assert {key: world.made[key] for key in wanted} == wanted
    stops = {key for key, request in world.every.items() if key in wanted and wanted[key][-1] in request.stop}
    assert {key: world.ended[key] for key in wanted} == {key: "stop" if key in stops else "length" for key in wanted}
    world.check_empty()


def roomy(scheduling: ModuleType, **other: int) -> Any:
    sizes = {"page": 4, "pages": 33, "slots": 9, "blocks": 8, "readers": 2, "chunk": 4, "lanes": 4, "loop_lanes": 4, "turns": 1}
    return scheduling.Limits(**sizes | other)


def test_prompts_and_tokens_take_turns(scheduling: ModuleType) -> None:
    world = World(scheduling, roomy(scheduling))
    world.add("short", 3, 20)
    world.step()
    world.add("long", 20, 2)
    for _ in range(10):
        world.step()
    assert world.entries == ["prefill", *["decode", "prefill"] * 5]


def test_the_oldest_is_never_put_off(scheduling: ModuleType) -> None:
    """Eight pages of four tokens for texts of up to 28: those that came last give theirs back, and go on before any that waits."""
    world = World(scheduling, roomy(scheduling, pages=9, lanes=3))
    for name in range(5):
        world.add(name, 4, 24)
    while 0 not in world.ended:
        world.step()
    assert world.scheduler.preempted > 0 and len(world.entries) <= 2 * 25, "the first has a part in every other call"
    while world.step():
        pass
    assert list(world.ended) == list(range(5))
    world.check_empty()


def test_a_late_one_is_not_starved_by_those_that_keep_coming(scheduling: ModuleType) -> None:
    world = World(scheduling, roomy(scheduling, pages=9, lanes=2))
    world.add("large", 24, 8)
    coming = 0
    while "large" not in world.ended:
        world.add(coming, 2, 3)
        coming += 1
        world.step()
        assert coming < 40, "smaller ones go before it for ever"


def test_a_request_waits_until_its_pages_are_free(scheduling: ModuleType) -> None:
    world = World(scheduling, roomy(scheduling, pages=9))
    world.add("a", 20, 4)
    world.add("b", 20, 4)
    world.step()
    assert (world.scheduler.running, world.scheduler.waiting) == (1, 1)
    while world.step():
        pass
    assert list(world.ended) == ["a", "b"] and world.scheduler.preempted == 0


def test_loops_are_for_when_nobody_waits(scheduling: ModuleType) -> None:
    def entries(*, turns: int = 4, others: int = 0, alternatives: int = 0, **limits: int) -> set[str]:
        world = World(scheduling, roomy(scheduling, turns=turns, **limits))
        world.add("a", 3, 9, alternatives=alternatives)
        for number in range(others):
            world.add(number, 3, 9)
        for _ in range(4):
            world.step()
        return set(world.entries) - {"prefill"}

    assert entries() == {"generate"} and entries(turns=1) == {"decode"}
    assert entries(alternatives=2) == {"decode"}, "a loop tells no other tokens"
    assert entries(others=1, lanes=1) == {"decode"}, "one waits"
    assert entries(others=1, loop_lanes=1) == {"decode"}
    assert entries(others=1) == {"generate"}


def test_a_loop_takes_no_pages_from_others(scheduling: ModuleType) -> None:
    world = World(scheduling, roomy(scheduling, page=1, pages=5, blocks=4, turns=2))
    world.add("a", 1, 2)
    world.add("b", 1, 3)
    while world.step():
        pass
    assert world.scheduler.preempted == 0 and world.entries == ["prefill", "decode", "decode"]


@pytest.mark.parametrize(
    ("prompt", "most", "stops", "said"),
    [
        (0, 1, 0, "a request needs a token to begin with and one to make"),
        (3, 0, 0, "a request needs a token to begin with and one to make"),
        (30, 3, 0, "33 tokens, with those to make; the bundle was built for 32"),
        (3, 3, 9, "9 stop tokens; a request may have 8"),
    ],
)
def test_what_can_never_be_served_is_refused(scheduling: ModuleType, prompt: int, most: int, stops: int, said: str) -> None:
    scheduler = scheduling.Scheduler(roomy(scheduling))
    request = scheduling.Request(prompt=(1,) * prompt, most=most, stop=tuple(range(stops)))
    with pytest.raises(ValueError, match=said):
        scheduler.add("a", request)
    assert scheduler.next() is None


def test_a_name_is_used_once(scheduling: ModuleType) -> None:
    world = World(scheduling, roomy(scheduling))
    world.add("a", 3, 3)
    with pytest.raises(ValueError, match="a request 'a' is open already"):
        world.add("a", 3, 3)


def test_a_cancelled_request_may_be_in_a_call(scheduling: ModuleType) -> None:
    scheduler = scheduling.Scheduler(roomy(scheduling))
    for name in ("a", "b"):
        scheduler.add(name, scheduling.Request(prompt=(1, 2), most=1))
    step = scheduler.next()
    scheduler.cancel("a")
    found = scheduler.finish(step, [[scheduling.Token(7, -1.0)]] * 2)
    assert [(each.key, each.reason) for each in found] == [("b", "length")]
    assert scheduler.pages.taken == 0 and scheduler.next() is None


def test_a_pool_gives_a_number_to_one_owner() -> None:
    from cgserve.language.pages import Pool

    pool, order = Pool(6), random.Random(0)
    mine = pool.take(3)
    with pytest.raises(ValueError, match="3 numbers asked for, 2 are free"):
        pool.take(3)
    assert pool.free == 2 and 0 not in mine
    order.shuffle(mine)
    pool.give_back(mine)
    with pytest.raises(ValueError, match="is nobody's"):
        pool.give_back(mine[:1])
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
