"""bundles/cgserve/scheduling: for any sequence of requests and disconnects, pages and lanes have one owner, and every request is
served."""

from __future__ import annotations

import importlib
import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.places import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def scheduling() -> Any:
    """Returns the module. Skips the test where its packages are missing."""
    module = importlib.import_module("cgserve.scheduling.scheduler")
    requests = importlib.import_module("cgserve.scheduling.requests")
    names = {name: value for name, value in (vars(requests) | vars(module)).items() if name[0].isupper()}
    return SimpleNamespace(**names)


class Followed:
    """Rules that check how they are called: once for every token of an answer, in order; and with the last token again if a text is
    recomputed."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self.tokens = prompt, list[int]()

    def follow(self, place: int, token: int) -> None:
        count = place - self.prompt
        if count == len(self.tokens) + 1:
            self.tokens.append(token)
        assert count == len(self.tokens) and (not count or self.tokens[-1] == token)


class World:
    """A scheduler, a model whose next token depends on the complete text, and a check of every step.

    `cache` replaces the pages: for each (page, place) it holds the hash of the text up to this token, and the token. A call runs
    when it is planned. Its results are reported later if the scheduler plans ahead.
    """

    def __init__(self, scheduling: Any, limits: Any) -> None:
        self.scheduling, self.limits = scheduling, limits
        self.scheduler = scheduling.Scheduler(limits)
        self.cache: dict[tuple[int, int], tuple[int, int]] = {}
        self.slots: dict[int, object] = {}
        self.requests: dict[object, Any] = {}
        self.every: dict[object, Any] = {}  # also requests that have ended or were cancelled
        self.generated: dict[object, list[int]] = {}
        self.ended: dict[object, str] = {}
        self.entries: list[str] = []
        self.read: dict[object, int] = {}  # tokens of prompts that calls have read
        self.under_way: deque[tuple[Any, Any]] = deque()  # steps whose results are not reported yet, and the results
        self.fails = False

    def add(
        self, key: object, prompt: int, most: int, stop: int = -1, family: object = None, *, ruled: bool = False, **sampling: Any
    ) -> None:
        """Adds a request. Prompts of one `family` have equal beginnings."""
        tokens = prompt_of(key if family is None else family, prompt)
        sampled = self.scheduling.Sampling(**sampling)
        rules = Followed(prompt) if ruled else None
        request = self.scheduling.Request(
            prompt=tokens, most=most, stop=(stop,) if stop >= 0 else (), sampling=sampled, rules=rules
        )
        self.scheduler.add(key, request)
        self.requests[key] = self.every[key] = request
        self.generated[key] = []

    def cancel(self, key: object) -> None:
        self.scheduler.cancel(key)
        self.requests.pop(key, None)

    def step(self) -> bool:
        """Plans a call, and reports all results. Returns False if no request is open."""
        planned = self.plan()
        while self.tell():
            pass
        return planned

    def plan(self) -> bool:
        """Plans and makes one call."""
        step = self.scheduler.next()
        if step is None:
            return False
        self.check(step)
        self.entries.append(step.entry)
        before = self.under_way[-1][1] if self.under_way else None
        rows: Any = "failed" if self.fails else None
        if isinstance(before, str) and any(lane.behind >= 0 for lane in step.lanes):
            rows = "not called"
        if rows is None:
            failed = {lane.key for other, rows in self.under_way if rows == "failed" for lane in other.lanes}  # to be dropped
            nothing = [self.scheduling.Token(0, 0.0)]
            rows = [nothing if lane.key in failed else self.run(lane, step.entry, before) for lane in step.lanes]
        self.under_way.append((step, rows))
        return True

    def tell(self) -> bool:
        """Reports the results of the oldest call."""
        if not self.under_way:
            return False
        _, rows = self.under_way.popleft()
        if rows == "failed":
            for key in self.scheduler.fail():
                del self.requests[key]
        elif rows == "not called":
            self.scheduler.undo()
        for progress in self.scheduler.finish(rows) if not isinstance(rows, str) else ():
            assert progress.key in self.requests
            self.generated[progress.key] += [token.id for token in progress.tokens]
            if progress.reason is not None:
                self.ended[progress.key] = progress.reason
                del self.requests[progress.key]
        return True

    def check(self, step: Any) -> None:
        limits, lanes = self.limits, step.lanes
        most = {"prefill": limits.readers[-1], "decode": limits.lanes, "generate": limits.loop_lanes}[step.entry]
        assert 1 <= len(lanes) <= most
        texts = {lane.key: lane for lane in lanes}
        several = limits.several and step.entry == "prefill"
        assert several or len(texts) == len(lanes), "a request with two lanes"
        slots = [lane.slot for lane in texts.values()]
        assert len(set(slots)) == len(slots), "a slot with two owners"
        read, written = Counter[int](), set[int]()
        for lane in texts.values():
            read.update(lane.pages)
        for before, lane in zip((None, *lanes), lanes, strict=False):
            assert all(0 < page < limits.pages for page in lane.pages) and 0 < lane.slot < limits.slots
            assert 1 <= len(lane.ids) <= (limits.chunk if step.entry == "prefill" else 1)
            assert 1 <= lane.most <= (limits.turns if step.entry == "generate" else 1)
            end = lane.start + len(lane.ids) + lane.most - 1
            assert end <= len(lane.pages) * limits.page and len(lane.pages) <= limits.blocks
            written.update(lane.pages[lane.start // limits.page : -(-end // limits.page)])
            alone = lane.sampling.penalty != 1.0 or not limits.shared
            if alone and self.slots.get(lane.slot) != lane.key:
                assert lane.start == 0 and step.entry == "prefill", "a text begins with a prefill, which empties the slot"
            if before is not None and before.key == lane.key:
                assert lane.sampling.penalty == 1.0 and before.start + len(before.ids) == lane.start
                assert len(before.ids) == limits.chunk
            self.slots[lane.slot] = lane.key
        assert all(read[page] == 1 for page in written), "a page that one writes and another reads"
        assert limits.shared or all(count == 1 for count in read.values()), "a page with two owners"

    def run(self, lane: Any, entry: str, before: Any) -> list[Any]:
        """Reads the text back from the pages, as attention would, and continues it."""
        text = list[int]()
        for place in range(lane.start):
            beginning, token = self.cache[self._place(lane, place)]
            text.append(token)
            assert beginning == hash(tuple(text)), "the pages hold another text than this"
        for token in lane.ids if lane.behind < 0 else [before[lane.behind][-1].id]:
            text.append(token)
            self._write(lane, text)
        request = self.every[lane.key]
        known = [*request.prompt, *self.generated[lane.key]]
        assert text[: len(known)] == known[: len(text)], "the pages hold another text than this"
        if entry == "prefill":
            self.read[lane.key] = self.read.get(lane.key, 0) + len(lane.ids)
        if lane.rules is not None:
            assert lane.most == 1, "rules are asked before every token"
            lane.rules.follow(len(text), text[-1])
        tokens = []
        for _ in range(lane.most):
            tokens.append(following(text))
            if tokens[-1] in lane.stop or len(tokens) == lane.most:
                break
            text.append(tokens[-1])
            self._write(lane, text)
        return [self.scheduling.Token(token, 0.0) for token in tokens]

    def _place(self, lane: Any, place: int) -> tuple[int, int]:
        return lane.pages[place // self.limits.page], place % self.limits.page

    def _write(self, lane: Any, text: list[int]) -> None:
        self.cache[self._place(lane, len(text) - 1)] = hash(tuple(text)), text[-1]

    def check_empty(self) -> None:
        scheduler, limits = self.scheduler, self.limits
        assert scheduler.next() is None and scheduler.running == scheduler.waiting == 0
        assert scheduler.pages.taken == scheduler.slots.taken == 0, "a leak"
        assert sorted(scheduler.pages.take(limits.pages - 1)) == list(range(1, limits.pages))
        assert sorted(scheduler.slots.take(limits.slots - 1)) == list(range(1, limits.slots))


def prompt_of(family: object, count: int) -> tuple[int, ...]:
    """Returns a prompt of `count` tokens. If `family` is a number, the prompt begins like that of family 0, for 5 (family % 4)
    tokens."""
    parts = family % 4 * 5 if isinstance(family, int) else 0
    return tuple([hash((0 if place < parts else family, place)) % 1000 for place in range(count)])


def following(text: list[int]) -> int:
    """Returns the next token of a text, like a model at temperature 0."""
    return hash(tuple(text)) % 1000


def continued(prompt: tuple[int, ...], most: int, stop: tuple[int, ...]) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + most and not (len(text) > len(prompt) and text[-1] in stop):
        text.append(following(text))
    return text[len(prompt) :]


LIMITS = st.fixed_dictionaries(
    {
        "page": st.integers(1, 4), "pages": st.integers(2, 14), "slots": st.integers(2, 6), "blocks": st.integers(1, 8),
        "readers": st.sampled_from([(1,), (2,), (3,), (1, 3), (2, 8)]), "chunk": st.integers(1, 6), "lanes": st.integers(1, 4),
        "loop_lanes": st.integers(0, 4), "turns": st.integers(1, 5), "ahead": st.booleans(),
    }
).filter(lambda limits: min(limits["blocks"], limits["pages"] - 1) * limits["page"] >= 2)  # fmt: skip
SHARING = st.sampled_from([{}, {"several": True}, {"several": True, "shared": True}])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 10**6)),
        st.sampled_from([("plan",), ("plan",), ("plan",), ("tell",), ("tell",), ("fail",)]),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(limits=LIMITS, sharing=SHARING, events=EVENTS)
def test_requests_and_cancellations_in_any_order(
    scheduling: Any, limits: dict[str, Any], sharing: dict[str, bool], events: list[tuple[Any, ...]]
) -> None:
    world = World(scheduling, scheduling.Limits(**limits, **sharing, vocabulary=1000))
    context, wanted = world.limits.context, {}
    for number, (what, *rest) in enumerate(events):
        if what == "add":
            prompt = 1 + rest[0] % (context - 1)
            most = 1 + rest[1] % (context - prompt)
            stop, family = -1, rest[1] % 8
            if rest[2] == 0:  # an ordinary token is the stop token
                stop = continued(prompt_of(family, prompt), most, ())[rest[1] % most]
            penalty = 1.5 if rest[2] == 3 else 1.0
            world.add(number, prompt, most, stop, family, alternatives=int(rest[2] == 1), penalty=penalty, ruled=rest[0] % 3 == 0)
            request = world.requests[number]
            wanted[number] = continued(request.prompt, request.most, request.stop)
        elif what == "cancel" and world.requests:
            world.cancel(sorted(world.requests)[rest[0] % len(world.requests)])
        elif what == "tell":
            world.tell()
        else:
            world.fails = what == "fail"
            world.plan()
            world.fails = False
    steps = 0
    while world.plan() or world.tell():
        steps += 1
        assert steps < 400 * (1 + len(events)), "it goes on for ever"
    answers = {key: world.generated[key] for key in world.ended}
    assert answers == {key: wanted[key] for key in world.ended} and not world.requests
    stops = {key for key, request in world.every.items() if wanted[key][-1] in request.stop}
    assert world.ended == {key: "stop" if key in stops else "length" for key in world.ended}
    for key, request in world.every.items():
        if request.rules is not None:
            answer, taken = world.generated[key], request.rules.tokens
            assert taken[: len(answer)] == answer[: len(taken)] and (key not in world.ended or len(taken) >= len(answer) - 1)
    world.check_empty()


@pytest.mark.parametrize("shared", [False, True])
def test_twenty_thousand_requests_leak_no_page(scheduling: Any, shared: bool) -> None:
    """A third of the requests are cancelled."""
    order = random.Random(0)
    sizes: dict[str, Any] = {"page": 4, "pages": 60, "slots": 17, "blocks": 16, "readers": (1, 4), "chunk": 4, "lanes": 16}
    limits = scheduling.Limits(**sizes, several=shared, shared=shared)
    scheduler = scheduling.Scheduler(limits)
    under_way, open_ones, count = deque[Any](), list[int](), 0
    while count < 20_000 or open_ones or under_way:
        if count < 20_000 and len(open_ones) < 24:
            prompt = prompt_of(order.randrange(8), order.randrange(1, 40))
            scheduler.add(count, scheduling.Request(prompt=prompt, most=order.randrange(1, 12)))
            open_ones.append(count)
            count += 1
        if open_ones and order.random() < 0.08:
            scheduler.cancel(open_ones.pop(order.randrange(len(open_ones))))
        step = scheduler.next() if len(under_way) < 2 else None
        if step is not None:
            under_way.append(step)
        elif under_way:
            tokens = [[scheduling.Token(order.randrange(1000), 0.0)] for _ in under_way.popleft().lanes]
            ended = {progress.key for progress in scheduler.finish(tokens) if progress.reason is not None}
            open_ones = [key for key in open_ones if key not in ended]
        assert scheduler.pages.taken + scheduler.pages.free == limits.pages - 1
    assert scheduler.preempted > 0 and (scheduler.shared > 20_000) == shared
    assert scheduler.pages.taken == scheduler.slots.taken == 0, "a leak"
    assert sorted(scheduler.pages.take(limits.pages - 1)) == list(range(1, limits.pages))


def roomy(scheduling: Any, **other: Any) -> Any:
    sizes: dict[str, Any] = {"page": 4, "pages": 33, "slots": 9, "blocks": 8, "chunk": 4, "lanes": 4, "loop_lanes": 4}
    sizes |= {"readers": (2,), "turns": 1}
    return scheduling.Limits(**sizes | other)


def test_prompts_and_tokens_take_turns(scheduling: Any) -> None:
    world = World(scheduling, roomy(scheduling))
    world.add("short", 3, 20)
    world.step()
    world.add("long", 20, 2)
    for _ in range(10):
        world.step()
    assert world.entries == ["prefill", *["decode", "prefill"] * 5]


def test_the_oldest_request_is_never_preempted(scheduling: Any) -> None:
    """There are eight pages of four tokens for texts of up to 28 tokens. The newest texts give their pages back, and continue
    before requests that have not begun."""
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


def test_a_late_request_is_not_starved_by_new_ones(scheduling: Any) -> None:
    world = World(scheduling, roomy(scheduling, pages=9, lanes=2))
    world.add("large", 24, 8)
    coming = 0
    while "large" not in world.ended:
        world.add(coming, 2, 3)
        coming += 1
        world.step()
        assert coming < 40, "smaller ones go before it for ever"


def test_a_request_waits_until_its_pages_are_free(scheduling: Any) -> None:
    world = World(scheduling, roomy(scheduling, pages=9))
    world.add("a", 20, 4)
    world.add("b", 20, 4)
    world.step()
    assert (world.scheduler.running, world.scheduler.waiting) == (1, 1)
    while world.step():
        pass
    assert list(world.ended) == ["a", "b"] and world.scheduler.preempted == 0


def test_loops_are_for_when_nobody_waits(scheduling: Any) -> None:
    def entries(*, turns: int = 4, others: int = 0, alternatives: int = 0, ruled: bool = False, **limits: int) -> set[str]:
        world = World(scheduling, roomy(scheduling, turns=turns, vocabulary=1000, **limits))
        world.add("a", 3, 9, alternatives=alternatives, ruled=ruled)
        for number in range(others):
            world.add(number, 3, 9)
        for _ in range(4):
            world.step()
        return set(world.entries) - {"prefill"}

    assert entries() == {"generate"} and entries(turns=1) == {"decode"}
    assert entries(alternatives=2) == {"decode"}, "a loop tells no other tokens"
    assert entries(ruled=True) == {"decode"}, "a mask is known after every token alone"
    assert entries(others=1, lanes=1) == {"decode"}, "one waits"
    assert entries(others=1, loop_lanes=1) == {"decode"}
    assert entries(others=1) == {"generate"}


def test_a_loop_takes_no_pages_from_others(scheduling: Any) -> None:
    world = World(scheduling, roomy(scheduling, page=1, pages=5, blocks=4, turns=2))
    world.add("a", 1, 2)
    world.add("b", 1, 3)
    while world.step():
        pass
    assert world.scheduler.preempted == 0 and world.entries == ["prefill", "decode", "decode"]


@pytest.mark.parametrize(
    ("prompt", "most", "stops", "said"),
    [
        (0, 1, 0, "a request needs at least one prompt token and max_tokens of at least 1"),
        (3, 0, 0, "a request needs at least one prompt token and max_tokens of at least 1"),
        (30, 3, 0, "prompt and max_tokens are 33 tokens together; the bundle was built for 32"),
        (3, 3, 9, "9 stop tokens; a request may have 8"),
    ],
)
def test_what_can_never_be_served_is_refused(scheduling: Any, prompt: int, most: int, stops: int, said: str) -> None:
    scheduler = scheduling.Scheduler(roomy(scheduling))
    request = scheduling.Request(prompt=(1,) * prompt, most=most, stop=tuple(range(stops)))
    with pytest.raises(ValueError, match=said):
        scheduler.add("a", request)
    assert scheduler.next() is None


def test_a_name_is_used_once(scheduling: Any) -> None:
    world = World(scheduling, roomy(scheduling))
    world.add("a", 3, 3)
    with pytest.raises(ValueError, match="a request 'a' is open already"):
        world.add("a", 3, 3)


def test_a_cancelled_request_may_be_in_a_call(scheduling: Any) -> None:
    scheduler = scheduling.Scheduler(roomy(scheduling))
    for name in ("a", "b"):
        scheduler.add(name, scheduling.Request(prompt=(1, 2), most=1))
    step = scheduler.next()
    scheduler.cancel("a")
    assert step is not None
    finished = scheduler.finish([[scheduling.Token(7, -1.0)]] * 2)
    assert [(progress.key, progress.reason) for progress in finished] == [("b", "length")]
    assert scheduler.pages.taken == 0 and scheduler.next() is None


def test_a_pool_gives_a_number_to_one_owner() -> None:
    from cgserve.scheduling.pages import Pool

    pool, order = Pool(6), random.Random(0)
    mine = pool.take(3)
    with pytest.raises(ValueError, match="3 numbers asked for, 2 are free"):
        pool.take(3)
    assert pool.free == 2 and 0 not in mine
    order.shuffle(mine)
    pool.give_back(mine)
    with pytest.raises(ValueError, match="is not allocated"):
        pool.give_back(mine[:1])
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]


# --- equal beginnings ------------------------------------------------------------------------------------------------------


def sharing(scheduling: Any, **other: Any) -> World:
    sizes: dict[str, Any] = {"pages": 200, "slots": 65, "lanes": 64, "blocks": 16, "readers": (2, 8)}
    sizes |= {"several": True, "shared": True}
    return World(scheduling, roomy(scheduling, **sizes | other))


def test_a_common_prefix_is_read_once(scheduling: Any) -> None:
    """20 texts come at once. Their first 24 tokens are equal, and up to 6 more differ."""
    world = sharing(scheduling)
    for number in range(20):
        tokens = prompt_of("all", 24) + prompt_of(str(number), 1 + number % 6)
        world.scheduler.add(number, scheduling.Request(prompt=tokens, most=3))
        world.requests[number] = world.every[number] = scheduling.Request(prompt=tokens, most=3)
        world.generated[number] = []
    while world.step():
        pass
    unshared_tokens = sum(1 + number % 6 for number in range(20))
    assert sum(world.read.values()) == 24 + unshared_tokens and world.scheduler.shared == 19 * 24
    world.add("later", 26, 2, family="all")
    while world.step():
        pass
    assert world.read["later"] == 2, "whoever ended leaves what was read"
    assert world.generated["later"] == continued(prompt_of("all", 26), 2, ())
    world.check_empty()


def test_the_least_recently_used_pages_are_evicted_first(scheduling: Any) -> None:
    """A text takes five of twelve pages, and four of these are kept when it ends. First the last pages of "b" are used again, then
    all pages of "b", then the last page of "a", which was used later."""
    world = sharing(scheduling, pages=13, blocks=12)
    for name in ("a", "b", "a", "c", "d"):
        world.add(object(), 17, 1, family=name)
        while world.step():
            pass
    read = world.scheduler.shared
    for name, count in (("d", 16), ("a", 12), ("b", 0)):
        world.add(object(), 17, 1, family=name)
        while world.step():
            pass
        assert world.scheduler.shared - read == count, name
        read = world.scheduler.shared


def test_a_text_whose_penalty_counts_tokens_reads_all_of_them(scheduling: Any) -> None:
    world = sharing(scheduling)
    for key, penalty in (("a", 1.0), ("b", 1.2), ("c", 1.0)):
        world.add(key, 30, 2, family="all", penalty=penalty)
        while world.step():
            pass
    assert world.read == {"a": 30, "b": 30, "c": 2}


def test_generated_tokens_are_not_shared(scheduling: Any) -> None:
    """Other kernels computed the cache of these tokens, with other rounding. A prompt that continues an answer computes the tokens
    of the answer again."""
    world = sharing(scheduling)
    world.add("a", 9, 20)
    while world.step():
        pass
    tokens = prompt_of("a", 9) + tuple(world.generated["a"])
    world.every["b"] = world.requests["b"] = scheduling.Request(prompt=tokens, most=1)
    world.generated["b"] = []
    world.scheduler.add("b", world.requests["b"])
    while world.step():
        pass
    assert world.read["b"] == len(tokens) - 8


# --- chunks ----------------------------------------------------------------------------------------------------------------


def lanes_of_steps(scheduling: Any, prompts: dict[str, int], steps: int, **other: Any) -> list[list[str]]:
    """Returns the requests in the lanes of the first `steps` prefill calls, for prompts in the order of arrival."""
    scheduler = sharing(scheduling, shared=False, **other).scheduler
    for key, count in prompts.items():
        scheduler.add(key, scheduling.Request(prompt=prompt_of(key, count), most=1))
    rows = []
    for _ in range(steps):
        step = scheduler.next()
        rows.append([lane.key for lane in step.lanes])
        scheduler.finish([[scheduling.Token(1, 0.0)]] * len(step.lanes))
    return rows


def test_several_prompts_share_a_call(scheduling: Any) -> None:
    assert lanes_of_steps(scheduling, {"a": 9, "b": 4, "c": 10}, 1) == [["a"] * 3 + ["b"] + ["c"] * 3]
    assert lanes_of_steps(scheduling, {"a": 9, "b": 4, "c": 10}, 1, several=False) == [["a", "b"]], "three would leave five empty"


def test_a_short_prompt_does_not_wait_for_a_long_one(scheduling: Any) -> None:
    """The oldest prompt gets half of a call, then the shortest prompts follow."""
    prompts = {"long": 60, "middle": 40, "short": 6}
    assert lanes_of_steps(scheduling, prompts, 2) == [["long"] * 4 + ["middle"] * 2 + ["short"] * 2, ["long"] * 4 + ["middle"] * 4]
    assert lanes_of_steps(scheduling, prompts, 4, readers=(1,)) == [["long"], ["short"], ["long"], ["short"]]


@pytest.mark.parametrize(("wanted", "lanes"), [(1, 1), (2, 2), (3, 2), (4, 4), (8, 8), (9, 8), (15, 8), (16, 16), (40, 32)])
def test_a_call_is_half_full_at_least(scheduling: Any, wanted: int, lanes: int) -> None:
    from cgserve.scheduling.scheduler import lanes_of

    assert lanes_of((2, 8, 32), wanted) == lanes
