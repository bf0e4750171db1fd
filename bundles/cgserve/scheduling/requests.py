"""What is asked of the scheduler, what it asks of the model, and what both answer.  Values; the standard library alone."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

Entry = Literal["prefill", "decode", "generate"]
Reason = Literal["stop", "length"]

STOPS = 8
"""Stop tokens that a lane may have, as in cgcompile/language_models/causal_lm.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a bundle was built for.

    `page`: tokens in a page; `pages`, `slots`: how many there are, with page 0 and slot 0, which are nobody's; `blocks`: pages that
    a lane may have; `readers` and `chunk`: the numbers of lanes of a prefill call, ascending, and tokens of each; `lanes`: of a
    decode call; `loop_lanes` and `turns`: lanes of a generate call and tokens that it makes for each, 0 and 1 where there is no
    such call.

    `several`: whether a prefill call may have several lanes of one text, one behind the other.  `shared`: whether texts with equal
    beginnings may have the same pages of these.  Neither is so where a slot carries a state from token to token.  `ahead`: whether
    a second step may be planned before the first is finished; not where tokens decide which text is read again.

    `vocabulary`: the tokens that a mask has bits for, 0 where calls take no restrictions.
    """

    page: int
    pages: int
    slots: int
    blocks: int
    readers: tuple[int, ...]
    chunk: int
    lanes: int
    loop_lanes: int = 0
    turns: int = 1
    several: bool = False
    shared: bool = False
    ahead: bool = True
    vocabulary: int = 0

    @property
    def context(self) -> int:
        """Tokens that a request may have in all, prompt and answer."""
        return min(self.blocks, self.pages - 1) * self.page

    @property
    def unit(self) -> int:
        """Tokens that are shared together: whole pages and whole chunks.  A text is cut into the same chunks then, wherever its
        reading begins, and so has the same bits."""
        return math.lcm(self.page, self.chunk)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a request's tokens are chosen: the fields of sampling.Sampling, for one lane."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    penalty: float = 1.0
    seed: int = 0
    alternatives: int = 0
    min_p: float = 0.0
    deferred: int = 0


class Adapter(NamedTuple):
    """A LoRA adapter that a request is served with.  `place`: its number in the bank of the bundle, 0 for none.  `number`: of no
    other adapter that was ever at that place, so that what was read with that one is not taken for this one's; 0 for none."""

    place: int
    number: int


NO_ADAPTER = Adapter(0, 0)


class Rules(Protocol):
    """What restricts the tokens of one answer.  They are asked once for every token, in the order of the text."""

    words: array[Any]
    """The mask of the next token, 32-bit words: a bit for every token, 1 where it may come."""
    failure: str | None
    """Why no token can be chosen by them any more."""

    def follow(self, place: int, token: int, *, fresh: bool) -> Mapping[int, float]:
        """Takes in `token`, the one before `place` of the text, and writes the mask for the token at `place`.  Gives the biases
        that have changed; `fresh`: all of them."""

    def bias(self, token: int) -> float:
        """What is added to the logit of a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """`prompt`: at least one token; `most`: tokens to make, at least one; `stop`: tokens that end the answer, 8 at most; `rules`:
    what restricts its tokens, which no other request has; `forced`: tokens that they give, so that none of these ends the
    answer; `adapter`: what the model is adapted with."""

    prompt: tuple[int, ...]
    most: int
    stop: tuple[int, ...] = ()
    sampling: Sampling = Sampling()
    rules: Rules | None = None
    forced: int = 0
    adapter: Adapter = NO_ADAPTER


def check(request: Request, limits: Limits) -> None:
    """Raises ValueError for a request that can never be served."""
    if not request.prompt or request.most < 1:
        raise ValueError("a request needs a token to begin with and one to make")
    if len(request.stop) > STOPS:
        raise ValueError(f"{len(request.stop)} stop tokens; a request may have {STOPS}")
    if request.rules is not None and not limits.vocabulary:
        raise ValueError("the bundle has no entry `choose`, which restricts tokens: build it again")
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


class Lane(NamedTuple):
    """One request's part of a call: its new tokens `ids`, the `start` tokens that `pages` hold already, its slot, how many tokens
    may be made, and the `length` of its prompt.

    `behind`: where it is 0 or more, the one new token is what the call before makes in its lane of that number, and `ids` has a 0
    for it.  `pages` grow with the request: a later step may put more behind them.

    `rules`: of a lane whose token is restricted; None where what the lane makes is no token of the text.  `adapter`: the place of
    its adapter.
    """

    key: Hashable
    ids: Sequence[int]
    start: int
    pages: Sequence[int]
    slot: int
    most: int
    stop: tuple[int, ...]
    sampling: Sampling
    length: int = 0
    behind: int = -1
    rules: Rules | None = None
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """A call of the model.  A request has several lanes in a prefill call alone, in the order of its text."""

    entry: Entry
    lanes: tuple[Lane, ...]


class Made(NamedTuple):
    """What a call made: the last token of every lane, and by `rows` all of every lane."""

    tokens: Sequence[int]
    rows: Callable[[], Sequence[Sequence[Token]]]


Call = Callable[[Made | None], Made]
"""A call that is ready to be made, given what the call before it made, None where there was none or it failed."""


class Progress(NamedTuple):
    """What a step made for a request; `reason` is why it ended: "stop" (the last token is a stop token), "length", or None."""

    key: Hashable
    tokens: Sequence[Token]
    reason: Reason | None
