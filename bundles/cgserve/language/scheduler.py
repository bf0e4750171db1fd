"""Continuous batching: which requests the next call of the model serves, and which pages of the cache each has.

A value that calls change, with no model, clock, thread or network: `add`, `cancel`, then again and again `next` for a step and
`finish` with what the model made of it.

The rules.  Requests are taken in the order in which they came.  One that was taken reads its prompt by chunks, then makes tokens;
where some read and others make tokens, calls for the two take turns, so that neither waits for more than one call of the other.
Pages are taken when tokens need them, not in advance.  Where none is left, the request that came last gives all of its own back,
goes to the head of those that wait, and later reads again what it had.  The token at a place is drawn by the request's seed and the
place alone, so its text goes on as it would have.  The oldest request always moves, and every request becomes the oldest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .pages import Pool, pages_for

Entry = Literal["prefill", "decode", "generate"]

STOPS = 8
"""Stop tokens that a lane may have, as in cgcompile/language_models/causal_lm.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a bundle was built for.

    `page`: tokens in a page; `pages`, `slots`: how many there are, with page 0 and slot 0, which are nobody's; `blocks`: pages that
    a lane may have; `readers` and `chunk`: lanes of a prefill call, and tokens of each; `lanes`: of a decode call; `loop_lanes`
    and `turns`: lanes of a generate call and tokens that it makes for each, 0 and 1 where there is no such call.
    """

    page: int
    pages: int
    slots: int
    blocks: int
    readers: int
    chunk: int
    lanes: int
    loop_lanes: int = 0
    turns: int = 1

    @property
    def context(self) -> int:
        """Tokens that a request may have in all, prompt and answer."""
        return min(self.blocks, self.pages - 1) * self.page


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a request's tokens are chosen: the fields of sampling.Sampling, for one lane."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    penalty: float = 1.0
    seed: int = 0
    alternatives: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """`prompt`: at least one token; `most`: tokens to make, at least one; `stop`: tokens that end the answer, 8 at most."""

    prompt: tuple[int, ...]
    most: int
    stop: tuple[int, ...] = ()
    sampling: Sampling = Sampling()


def check(request: Request, limits: Limits) -> None:
    """Raises ValueError for a request that can never be served."""
    if not request.prompt or request.most < 1:
        raise ValueError("a request needs a token to begin with and one to make")
    if len(request.stop) > STOPS:
        raise ValueError(f"{len(request.stop)} stop tokens; a request may have {STOPS}")
    total = len(request.prompt) + request.most
    if total > limits.context:
        raise ValueError(f"{total} tokens, with those to make; the bundle was built for {limits.context}")


class Token(NamedTuple):
    """A token that was made, its log-probability, and the likeliest ones with theirs where the request asks for any.  `reread`:
    the model reads the whole text again before this token, because it outgrew a first context (long ropes)."""

    id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()
    reread: bool = False


@dataclass(frozen=True, slots=True)
class Lane:
    """One request's part of a call: its new tokens `ids`, the `start` tokens that `pages` hold already, its slot, how many tokens
    may be made, and the `length` of its prompt."""

    key: Hashable
    ids: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    slot: int
    most: int
    stop: tuple[int, ...]
    sampling: Sampling
    length: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """A call of the model.  No request has two lanes."""

    entry: Entry
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step made for a request; `reason` is why it ended: "stop" (the last token is a stop token), "length", or None."""

    key: Hashable
    tokens: tuple[Token, ...]
    reason: Literal["stop", "length"] | None


@dataclass(slots=True, eq=False)
class _Text:
    """A request's tokens; the first `read` of them are in its pages.  `slot` is 0 while it waits.  `length`: of the prompt, or of
    the text that was read again in its place."""

    key: Hashable
    request: Request
    tokens: list[int]
    read: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    length: int = 0

    @property
    def reading(self) -> bool:
        """Whether a prefill call comes next: always for a text that begins, which is what tells the model that the slot is new."""
        return self.read == 0 or len(self.tokens) - self.read > 1

    @property
    def left(self) -> int:
        """Tokens that may still be made."""
        return len(self.request.prompt) + self.request.most - len(self.tokens)


class Scheduler:
    """Requests over one cache.  `preempted` counts those that gave their pages back before their end."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pages, self.slots = Pool(limits.pages), Pool(limits.slots)
        self.preempted = 0
        self._waiting: deque[_Text] = deque()
        self._running: list[_Text] = []  # both in order of arrival; whoever waits came after all that run
        self._open: dict[Hashable, _Text] = {}
        self._prefilled = False  # whether the last step was a prefill

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
        self._open[key] = text = _Text(key, request, list(request.prompt), length=len(request.prompt))
        self._waiting.append(text)

    def cancel(self, key: Hashable) -> None:
        """Forgets a request, and frees what it had.  One that has ended is no error: its end and this may cross."""
        text = self._open.pop(key, None)
        if text is not None:
            self._drop(text)

    def next(self) -> Step | None:
        """The next call; None where no request is open."""
        self._admit()
        order: tuple[Entry, ...] = ("decode", "prefill") if self._prefilled else ("prefill", "decode")
        for entry in order:
            step = self._prefill() if entry == "prefill" else self._decode()
            if step.lanes:
                self._prefilled = entry == "prefill"
                return step
        return None

    def finish(self, step: Step, made: Sequence[Sequence[Token]]) -> list[Progress]:
        """Takes in what the model made for each lane of the step that `next` gave last.  A request that was cancelled meanwhile is
        left out, and so is one whose prompt goes on."""
        found = []
        for lane, tokens in zip(step.lanes, made, strict=True):
            text = self._open.get(lane.key)
            if text is None or text.slot != lane.slot or text.read != lane.start:
                continue
            text.read += len(lane.ids) + len(tokens) - 1
            if text.read < len(text.tokens):
                continue  # what a chunk inside the prompt made is no part of the text
            text.tokens += [token.id for token in tokens]
            if tokens[-1].reread:
                text.read, text.length = 0, len(text.tokens)
            reason: Literal["stop", "length"] | None = None
            if tokens[-1].id in text.request.stop:
                reason = "stop"
            elif text.left <= 0:
                reason = "length"
            if reason is not None:
                self._drop(self._open.pop(lane.key))
            found.append(Progress(lane.key, tuple(tokens), reason))
        return found

    # --- who has what ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Gives lanes to those that wait, while there are lanes, slots, and pages for all that a request has by now."""
        lanes = min(self.limits.lanes, self.limits.slots - 1)
        promised = sum(self._lacks(text, len(text.tokens)) for text in self._running)
        while self._waiting and len(self._running) < lanes:
            text = self._waiting[0]
            promised += self._lacks(text, len(text.tokens))
            if promised > self.pages.free:
                return
            (text.slot,) = self.slots.take(1)
            self._running.append(self._waiting.popleft())

    def _lacks(self, text: _Text, tokens: int) -> int:
        """Pages that a text needs besides its own to hold so many tokens."""
        return max(0, pages_for(tokens, self.limits.page) - len(text.pages))

    def _holds(self, text: _Text, tokens: int) -> bool:
        """Gives a text pages for so many tokens; those that came last lose theirs for it.  False where that is the text itself."""
        lacks = self._lacks(text, tokens)
        while lacks > self.pages.free:
            last = self._running[-1]
            self._drop(last)
            last.read = 0
            self._waiting.appendleft(last)
            self.preempted += 1
            if last is text:
                return False
        text.pages += self.pages.take(lacks)
        return True

    def _drop(self, text: _Text) -> None:
        """Takes lane, slot and pages from a text, wherever it is."""
        (self._running if text.slot else self._waiting).remove(text)
        if text.slot:
            self.slots.give_back([text.slot])
        self.pages.give_back(text.pages)
        text.pages, text.slot = [], 0

    # --- steps -----------------------------------------------------------------------------------------------------

    def _prefill(self) -> Step:
        chunks = [(text, text.tokens[text.read :][: self.limits.chunk]) for text in self._running if text.reading]
        return Step("prefill", self._lanes([(text, chunk, 1) for text, chunk in chunks[: self.limits.readers]]))

    def _decode(self) -> Step:
        texts = [text for text in self._running if not text.reading]
        turns = self._turns(texts)
        lanes = self._lanes([(text, text.tokens[-1:], min(turns, text.left)) for text in texts])
        return Step("generate" if turns > 1 else "decode", lanes)

    def _turns(self, texts: Sequence[_Text]) -> int:
        """How many tokens a call may make for each: several where nobody would wait for its end, no log-probabilities of other
        tokens are asked for, and the pages are there."""
        turns = min(self.limits.turns, max([text.left for text in texts], default=1))
        if turns == 1 or len(texts) > self.limits.loop_lanes or len(texts) < len(self._running) or self._waiting:
            return 1
        if any(text.request.sampling.alternatives for text in texts):
            return 1
        needed = sum(self._lacks(text, text.read + min(turns, text.left)) for text in texts)
        return turns if needed <= self.pages.free else 1

    def _lanes(self, wanted: Iterable[tuple[_Text, Sequence[int], int]]) -> tuple[Lane, ...]:
        """Lanes for texts in order of arrival, with pages for the tokens that a call puts in.  Whoever loses pages on the way came
        later than who takes them, and so is in no lane yet."""
        lanes = []
        for text, ids, most in wanted:
            if text.slot and self._holds(text, text.read + len(ids) + most - 1):
                request = text.request
                lanes.append(
                    Lane(
                        text.key,
                        tuple(ids),
                        text.read,
                        tuple(text.pages),
                        text.slot,
                        most,
                        request.stop,
                        request.sampling,
                        text.length,
                    )
                )
        return tuple(lanes)
