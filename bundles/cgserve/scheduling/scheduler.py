"""Continuous batching: which requests the next call of the model serves, and which pages of the cache each has.

A value that calls change, with no model, clock, thread or network: `add`, `cancel`, then again and again `next` for a step and
`finish` with what the model made of it.  A second step may be asked for before the first is finished: tokens that the first makes
are told by its lane then, and a request that a stop token ends has a lane too many, whose token is dropped.

The rules.  Requests are taken in the order in which they came.  One that was taken reads its prompt by chunks, then makes tokens;
where some read and others make tokens, calls for the two take turns, so that neither waits for more than one call of the other.
Of what prefill calls read, half is the oldest's, and the shortest come next: a short prompt does not wait for a long one.
Pages are taken when tokens need them, not in advance.  Where none is left, the request that came last gives all of its own back,
goes to the head of those that wait, and later reads again what it had.  The token at a place is drawn by the request's seed and the
place alone, so its text goes on as it would have.  The oldest request always moves, and every request becomes the oldest.

Equal beginnings are read once: a text gets the pages of another that has read them, and waits for one that reads them just now.
Only what prefill calls wrote is shared, by whole chunks, and among texts of one adapter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from .pages import Pages, Pool, pages_for
from .requests import Entry, Lane, Limits, Progress, Reason, Request, Step, Token, check
from .texts import Flight, Row, Text


class Scheduler:
    """Requests over one cache.  `preempted` counts those that gave their pages back before their end, `shared` tokens of texts that
    others had read."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pages, self.slots = Pages(limits.pages), Pool(limits.slots)
        self.preempted = self.shared = 0
        self._waiting: deque[Text] = deque()
        self._running: list[Text] = []  # both in order of arrival; whoever waits came after all that run
        self._open: dict[Hashable, Text] = {}
        self._flights: deque[Flight] = deque()
        self._prefilled = False  # whether the last step was a prefill
        self._oldest = False  # whether the last prefill of one lane was the oldest's

    @property
    def waiting(self) -> int:
        """Requests that have no lane."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that have one."""
        return len(self._running)

    def add(self, key: Hashable, request: Request) -> None:
        """A request under a name of the caller's.  Raises ValueError where it can never be served, or the name is taken."""
        check(request, self.limits)
        if key in self._open:
            raise ValueError(f"a request {key!r} is open already")
        self._open[key] = text = Text(key, request, list(request.prompt), length=len(request.prompt))
        text.front = text.root
        self._waiting.append(text)

    def cancel(self, key: Hashable) -> None:
        """Forgets a request, and frees what it had.  One that has ended is no error: its end and this may cross."""
        text = self._open.pop(key, None)
        if text is not None:
            self._drop(text)

    def next(self) -> Step | None:
        """The next call; None where there is none before the one under way is finished, or no request is open."""
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
        """Takes in what the model made for each lane of the oldest step under way.  A request that was cancelled meanwhile is left
        out, and so is one whose prompt goes on."""
        flight = self._flights.popleft()
        for row, beginning in flight.beginnings:
            if row.text.pages is row.pages:
                self.pages.written(beginning)
            else:
                self.pages.forget(beginning)
        updates = list[Progress]()
        for (text, pages, makes, *_), tokens in zip(flight.rows, lane_tokens, strict=True):
            if not makes:
                continue  # what a chunk inside the prompt made is no part of the text
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
        """Forgets the requests of the oldest step under way, whose call failed.  Their keys."""
        flight = self._flights.popleft()
        for _, beginning in flight.beginnings:
            self.pages.forget(beginning)
        texts = {row.text for row in flight.rows if self._open.get(row.text.key) is row.text}
        for text in texts:
            self.cancel(text.key)
        return [text.key for text in texts]

    def undo(self) -> None:
        """Takes back the oldest step under way, which was never called: it needed what the one before it was to make."""
        flight = self._flights.popleft()
        for _, beginning in flight.beginnings:
            self.pages.forget(beginning)
        for text, pages, makes, read, front, known in flight.rows:
            text.ahead -= makes
            text.looping = False
            if text.pages is pages:
                text.read, text.front, text.known = min(text.read, read), front, known

    # --- who has what ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Gives lanes to those that wait, while there are lanes, slots, and pages for all that a request has by now."""
        lanes = min(self.limits.lanes, self.limits.slots - 1)
        if not self._waiting or len(self._running) >= lanes:
            return
        promised = sum(self._lacks(text, len(text.tokens) + text.ahead) for text in self._running)
        while self._waiting and len(self._running) < lanes and not self._waiting[0].ahead:
            text = self._waiting[0]
            text.goal = len(text.tokens)
            self._share(text)
            promised += self._lacks(text, len(text.tokens))
            if promised > self.pages.free:
                self.shared -= text.read
                self._release(text)
                return
            (text.slot,) = self.slots.take(1)
            self._running.append(self._waiting.popleft())

    def _lacks(self, text: Text, tokens: int) -> int:
        """Pages that a text needs besides its own to hold so many tokens."""
        return max(0, pages_for(tokens, self.limits.page) - len(text.pages))

    def _holds(self, text: Text, tokens: int) -> bool:
        """Gives a text pages for so many tokens; those that came last lose theirs for it.  False where that is the text itself."""
        lacks = pages_for(tokens, self.limits.page) - len(text.pages)
        if lacks <= 0:
            return True
        while lacks > self.pages.free:
            last = self._running[-1]
            self._drop(last)
            self._waiting.appendleft(last)
            self.preempted += 1
            if last is text:
                return False
        text.pages += self.pages.take(lacks)
        return True

    def _drop(self, text: Text) -> None:
        """Takes lane, slot and pages from a text, wherever it is."""
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
        """Gives a text the pages of what others have read of it already.  Whether a call under way reads more of it."""
        limits, unit = self.limits, self.limits.unit
        end = (text.goal - 1) // unit * unit  # a call has to read something, to make a token
        if not limits.shared or text.alone or text.read != text.known or text.read >= end:
            return False
        chain = self.pages.beginnings(text.front, text.tokens[text.read : end], limits.page)
        count = next((place for place, beginning in enumerate(chain) if not beginning.written), len(chain))
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
        """Tells what the pages of a text hold that a call fills."""
        page = self.limits.page
        for at in range(text.known, text.read - page + 1, page):
            text.front, fresh = self.pages.begin(text.front, text.tokens[at : at + page], text.pages[at // page])
            text.known = at + page
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
            if not text.slot or not self._holds(text, text.read + len(ids)):  # whoever loses pages on the way came later
                continue
            ends = text.read + len(ids) == text.goal
            for at in range(0, len(ids), self.limits.chunk):
                makes = ends and at + self.limits.chunk >= len(ids)
                lanes.append(text.lane(ids[at : at + self.limits.chunk], text.read + at, 1, makes=makes))
                flight.rows.append(Row(text, text.pages, makes, text.read, text.front, text.known))
            text.read += len(ids)
            text.ahead += ends
            text.row = len(lanes) - 1
            if self.limits.shared:
                self._begin(flight, text)
        flight.step = Step("prefill", tuple(lanes))
        return flight if lanes else None

    def _shares(self, reading: Sequence[Text]) -> list[tuple[Text, int]]:
        """(text, lanes of a prefill call that it gets), in order of arrival: half of them the oldest's, then the shortest's."""
        limits, chosen = self.limits, dict[Text, int]()
        fronts = set[tuple[int, tuple[int, ...]]]()
        wanted: list[tuple[Text, int]] = []
        for text in reading:
            if self._share(text):
                continue
            if limits.shared and not text.alone and text.read == text.known:
                unit = text.front, tuple(text.tokens[text.read : text.read + limits.unit])
                if unit in fronts and len(unit[1]) == limits.unit:
                    continue  # another text of this call reads it
                fronts.add(unit)
            chunks = -(-(text.goal - text.read) // limits.chunk)
            wanted.append((text, chunks if limits.several and not text.alone else 1))
        if not wanted:
            return []
        most = lanes_of(limits.readers, sum(count for _, count in wanted))
        self._oldest = most > 1 or not self._oldest
        if self._oldest:
            chosen[wanted[0][0]] = min(wanted[0][1], -(-most // 2))
        for text, count in [*sorted(wanted[1:], key=lambda pair: pair[0].goal - pair[0].read), wanted[0]]:
            free = most - sum(chosen.values())
            if free:
                chosen[text] = min(count, chosen.get(text, 0) + free)
        return [(text, chosen[text]) for text, _ in wanted if text in chosen]

    def _decode(self) -> Flight | None:
        texts = [text for text in self._running if text.read >= text.goal and text.left > 0 and not text.looping]
        if not texts:
            return None
        turns = self._turns(texts)
        if turns > 1 and any(text.ahead for text in texts):
            return None  # a loop begins with tokens that are known
        flight, lanes = Flight(Step("decode", ()), [], []), list[Lane]()
        for text in texts:
            most = min(turns, text.left) if turns > 1 else 1
            if not text.slot or not self._holds(text, text.read + most):
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
        """How many tokens a call may make for each: several where nobody would wait for its end, no log-probabilities of other
        tokens are asked for, no token is restricted, and the pages are there."""
        limit = self.limits.turns
        if limit == 1 or len(texts) > self.limits.loop_lanes or len(texts) < len(self._running) or self._waiting:
            return 1
        turns = min(limit, max([text.left for text in texts]))
        asked = [text.request for text in texts]
        if turns == 1 or any([request.sampling.alternatives or request.rules is not None for request in asked]):
            return 1
        needed = sum(self._lacks(text, text.read + min(turns, text.left)) for text in texts)
        return turns if needed <= self.pages.free else 1


def lanes_of(sizes: Sequence[int], wanted: int) -> int:
    """How many lanes a call has whose recorded numbers of lanes are `sizes`: those that are `wanted`, unless that would leave more
    than half of them empty, and fewer suffice for a first part."""
    fitting = next((size for size in sizes if size >= wanted), sizes[-1])
    smaller = [size for size in sizes if size <= wanted]
    return min(wanted, fitting) if fitting <= 2 * wanted or not smaller else smaller[-1]
