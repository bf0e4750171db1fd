"""Continuous batching: selects the requests of the next call, and assigns pages of the cache.

Has no model, clock, thread or network: call `add` and `cancel`, and repeatedly `next` for a step and `finish` with the model's
results.  A second step may be requested before the first is finished: its lanes then refer to tokens of the first.  If a stop token
ends a request meanwhile, the token of its extra lane is dropped.

The rules.  Requests are accepted in the order of arrival.  An accepted request reads its prompt by chunks, then generates tokens.
If some requests read and others generate, both kinds of calls alternate, so that neither waits for more than one call of the other.
In prefill calls the oldest request gets half of the lanes, then the shortest ones: a short prompt does not wait for a long one.
Pages are allocated when tokens need them, not in advance.  If no page is free, the last request that arrived gives back all its
pages, becomes the first of the waiting ones, and later reads its tokens again.  A token is sampled from the request's seed and
position only, so its text does not change.  The oldest request always proceeds, and every request becomes the oldest.

Equal beginnings are read once: a text shares the pages of another text that has read them, or waits while another text reads them.
Only results of prefill calls are shared, in whole chunks, and among texts of one adapter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from .pages import Pages, Pool, pages_for
from .requests import Entry, Lane, Limits, Progress, Reason, Request, Step, Token, check
from .texts import Flight, Row, Text


class Scheduler:
    """Requests over one cache.  `preempted`: how often a request gave back its pages early; `shared`: tokens that requests did not
    read, because other requests had read them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pages, self.slots = Pages(limits.pages), Pool(limits.slots)
        self.preempted = self.shared = 0
        self._waiting: deque[Text] = deque()
        self._running: list[Text] = []  # in order of arrival, as `_waiting`; waiting requests arrived after all running requests
        self._open: dict[Hashable, Text] = {}
        self._flights: deque[Flight] = deque()
        self._prefilled = False  # whether the last step was a prefill
        self._oldest = False  # whether the oldest request got the last prefill of a single lane

    @property
    def waiting(self) -> int:
        """The number of requests without a lane."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of requests with a lane."""
        return len(self._running)

    def add(self, key: Hashable, request: Request) -> None:
        """Adds a request with a key of the caller.  Raises ValueError if it can never be served, or the key is in use."""
        check(request, self.limits)
        if key in self._open:
            raise ValueError(f"a request {key!r} is open already")
        self._open[key] = text = Text(key, request, list(request.prompt), length=len(request.prompt))
        text.front = text.root
        self._waiting.append(text)

    def cancel(self, key: Hashable) -> None:
        """Removes a request and frees its pages.  Does nothing if it has already ended."""
        text = self._open.pop(key, None)
        if text is not None:
            self._drop(text)

    def next(self) -> Step | None:
        """Returns the next call; None if a running call must finish first, or no request is open."""
        if len(self._flights) > self.limits.ahead:
            return None
        self._admit()
        order: tuple[Entry, ...] = ("decode", "prefill") if self._prefilled else ("prefill", "decode")
        for entry in order:
            flight = self._prefill() if entry == "prefill" else self._decode()
            if flight is not None:
                self._prefilled = entry == "prefill"
                self._flights.append(flight)
                return flight.step
        return None

    def finish(self, lane_tokens: Sequence[Sequence[Token]]) -> list[Progress]:
        """Stores the model's results for the lanes of the oldest unfinished step.  Returns no progress for cancelled requests and
        for prompts that are not completely read."""
        flight = self._flights.popleft()
        for row, beginning in flight.beginnings:
            if row.text.pages is row.pages:
                self.pages.written(beginning)
            else:
                self.pages.forget(beginning)
        updates = list[Progress]()
        for (text, pages, makes, *_), tokens in zip(flight.rows, lane_tokens, strict=True):
            if not makes:
                continue  # the result of a chunk inside the prompt is not part of the text
            text.ahead -= 1
            if self._open.get(text.key) is not text:
                continue
            text.tokens += [token.id for token in tokens]
            if text.looping:
                text.looping = False
                if text.pages is pages:
                    text.read += len(tokens) - 1
            last, request = tokens[-1], text.request
            if last.reread and text.pages is pages:
                text.read, text.length, text.goal = 0, len(text.tokens), len(text.tokens)
            reason: Reason | None = None
            if last.id in request.stop and len(text.tokens) > len(request.prompt) + request.forced:
                reason = "stop"
            elif len(text.tokens) >= len(request.prompt) + request.most:
                reason = "length"
            if reason is not None:
                del self._open[text.key]
                self._drop(text)
            updates.append(Progress(text.key, tokens, reason))
        return updates

    def fail(self) -> list[Hashable]:
        """Removes the requests of the oldest unfinished step, whose call failed, and returns their keys."""
        flight = self._flights.popleft()
        for _, beginning in flight.beginnings:
            self.pages.forget(beginning)
        texts = {row.text for row in flight.rows if self._open.get(row.text.key) is row.text}
        for text in texts:
            self.cancel(text.key)
        return [text.key for text in texts]

    def undo(self) -> None:
        """Reverts the oldest unfinished step, which was not called because it needed the result of a failed call."""
        flight = self._flights.popleft()
        for _, beginning in flight.beginnings:
            self.pages.forget(beginning)
        for text, pages, makes, read, front, known in flight.rows:
            text.ahead -= makes
            text.looping = False
            if text.pages is pages:
                text.read, text.front, text.known = min(text.read, read), front, known

    # --- lanes, slots and pages ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Assigns lanes to waiting requests while there are lanes, slots, and pages for all their tokens."""
        lanes = min(self.limits.lanes, self.limits.slots - 1)
        if not self._waiting or len(self._running) >= lanes:
            return
        promised = sum(self._missing_pages(text, len(text.tokens) + text.ahead) for text in self._running)
        while self._waiting and len(self._running) < lanes and not self._waiting[0].ahead:
            text = self._waiting[0]
            text.goal = len(text.tokens)
            self._share(text)
            promised += self._missing_pages(text, len(text.tokens))
            if promised > self.pages.free:
                self.shared -= text.read
                self._release(text)
                return
            (text.slot,) = self.slots.take(1)
            self._running.append(self._waiting.popleft())

    def _missing_pages(self, text: Text, tokens: int) -> int:
        """Returns the number of missing pages for a text of `tokens` tokens."""
        return max(0, pages_for(tokens, self.limits.page) - len(text.pages))

    def _allocate(self, text: Text, tokens: int) -> bool:
        """Allocates pages for `tokens` tokens of a text.  If too few are free, the last requests lose their pages.  Returns False
        if the text itself loses its pages."""
        missing = pages_for(tokens, self.limits.page) - len(text.pages)
        if missing <= 0:
            return True
        while missing > self.pages.free:
            last = self._running[-1]
            self._drop(last)
            self._waiting.appendleft(last)
            self.preempted += 1
            if last is text:
                return False
        text.pages += self.pages.take(missing)
        return True

    def _drop(self, text: Text) -> None:
        """Removes lane, slot and pages from a text."""
        (self._running if text.slot else self._waiting).remove(text)
        if text.slot:
            self.slots.give_back([text.slot])
            text.slot = 0
        self._release(text)

    def _release(self, text: Text) -> None:
        self.pages.give_back(text.pages)
        text.pages, text.read, text.front, text.known = [], 0, text.root, 0

    # --- equal beginnings --------------------------------------------------------------------------------------------

    def _share(self, text: Text) -> bool:
        """Assigns pages that other texts have already read to a text.  Returns whether a running call reads more of it."""
        limits, unit = self.limits, self.limits.unit
        end = (text.goal - 1) // unit * unit  # a call must read at least one token to generate one
        if not limits.shared or text.alone or text.read != text.known or text.read >= end:
            return False
        chain = self.pages.beginnings(text.front, text.tokens[text.read : end], limits.page)
        count = next((number for number, beginning in enumerate(chain) if not beginning.written), len(chain))
        pages = count * limits.page // unit * unit // limits.page
        if pages:
            shared = [beginning.page for beginning in chain[:pages]]
            self.pages.share(shared)
            text.pages += shared
            text.read += pages * limits.page
            text.known, text.front = text.read, chain[pages - 1].number
            self.shared += pages * limits.page
        return count < len(chain)

    def _begin(self, flight: Flight, text: Text) -> None:
        """Registers the contents of the pages that a call fills."""
        page = self.limits.page
        for start in range(text.known, text.read - page + 1, page):
            text.front, fresh = self.pages.begin(text.front, text.tokens[start : start + page], text.pages[start // page])
            text.known = start + page
            if fresh is not None:
                flight.beginnings.append((flight.rows[-1], fresh))

    # --- steps -----------------------------------------------------------------------------------------------------

    def _prefill(self) -> Flight | None:
        reading = [text for text in self._running if text.reading]
        if not reading:
            return None
        flight, lanes = Flight(Step("prefill", ()), [], []), list[Lane]()
        for text, count in self._shares(reading):
            ids = text.tokens[text.read : min(text.goal, text.read + count * self.limits.chunk)]
            if not text.slot or not self._allocate(text, text.read + len(ids)):  # texts that lose their pages here arrived later
                continue
            ends = text.read + len(ids) == text.goal
            for start in range(0, len(ids), self.limits.chunk):
                makes = ends and start + self.limits.chunk >= len(ids)
                lanes.append(text.lane(ids[start : start + self.limits.chunk], text.read + start, 1, makes=makes))
                flight.rows.append(Row(text, text.pages, makes, text.read, text.front, text.known))
            text.read += len(ids)
            text.ahead += ends
            text.row = len(lanes) - 1
            if self.limits.shared:
                self._begin(flight, text)
        flight.step = Step("prefill", tuple(lanes))
        return flight if lanes else None

    def _shares(self, reading: Sequence[Text]) -> list[tuple[Text, int]]:
        """Returns (text, lanes of a prefill call) in order of arrival: half of the lanes for the oldest text, then for the shortest
        texts."""
        limits, chosen = self.limits, dict[Text, int]()
        fronts = set[tuple[int, tuple[int, ...]]]()
        candidates: list[tuple[Text, int]] = []
        for text in reading:
            if self._share(text):
                continue
            if limits.shared and not text.alone and text.read == text.known:
                unit = text.front, tuple(text.tokens[text.read : text.read + limits.unit])
                if unit in fronts and len(unit[1]) == limits.unit:
                    continue  # another text of this call reads the same tokens
                fronts.add(unit)
            chunks = -(-(text.goal - text.read) // limits.chunk)
            candidates.append((text, chunks if limits.several and not text.alone else 1))
        if not candidates:
            return []
        most = lanes_of(limits.readers, sum(count for _, count in candidates))
        self._oldest = most > 1 or not self._oldest
        if self._oldest:
            chosen[candidates[0][0]] = min(candidates[0][1], -(-most // 2))
        for text, count in [*sorted(candidates[1:], key=lambda pair: pair[0].goal - pair[0].read), candidates[0]]:
            free = most - sum(chosen.values())
            if free:
                chosen[text] = min(count, chosen.get(text, 0) + free)
        return [(text, chosen[text]) for text, _ in candidates if text in chosen]

    def _decode(self) -> Flight | None:
        texts = [text for text in self._running if text.read >= text.goal and text.left > 0 and not text.looping]
        if not texts:
            return None
        turns = self._turns(texts)
        if turns > 1 and any(text.ahead for text in texts):
            return None  # a loop needs known tokens
        flight, lanes = Flight(Step("decode", ()), [], []), list[Lane]()
        for text in texts:
            most = min(turns, text.left) if turns > 1 else 1
            if not text.slot or not self._allocate(text, text.read + most):
                continue
            if text.ahead:
                lanes.append(text.lane((0,), text.read, most, text.row))
            else:
                lanes.append(text.lane(text.tokens[-1:], text.read, most))
            flight.rows.append(Row(text, text.pages, True, text.read, text.front, text.known))
            text.row = len(lanes) - 1
            text.read += 1
            text.ahead += 1
            text.looping = turns > 1
        flight.step = Step("generate" if turns > 1 else "decode", tuple(lanes))
        return flight if lanes else None

    def _turns(self, texts: Sequence[Text]) -> int:
        """Returns how many tokens a call generates for each text: several if no request waits, no request asks for alternatives or
        has rules, and enough pages are free."""
        limit = self.limits.turns
        if limit == 1 or len(texts) > self.limits.loop_lanes or len(texts) < len(self._running) or self._waiting:
            return 1
        turns = min(limit, max([text.left for text in texts]))
        requests = [text.request for text in texts]
        if turns == 1 or any([request.sampling.alternatives or request.rules is not None for request in requests]):
            return 1
        needed = sum(self._missing_pages(text, text.read + min(turns, text.left)) for text in texts)
        return turns if needed <= self.pages.free else 1


def lanes_of(sizes: Sequence[int], wanted: int) -> int:
    """Returns how many of `wanted` lanes a call takes: all that fit into the recorded `sizes`.  If more than half of the call would
    be empty, it takes as many as the next smaller size has."""
    fitting = next((size for size in sizes if size >= wanted), sizes[-1])
    smaller = [size for size in sizes if size <= wanted]
    return min(wanted, fitting) if fitting <= 2 * wanted or not smaller else smaller[-1]
