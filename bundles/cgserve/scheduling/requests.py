"""Inputs and outputs of the scheduler and of the model.  Plain values; uses only the standard library."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

Entry = Literal["prefill", "decode", "generate"]
Reason = Literal["stop", "length"]

STOPS = 8
"""Maximum stop tokens of a lane, as in cgcompile/language_models/causal_lm.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The sizes that a bundle was built for.

    `page`: tokens in a page; `pages`, `slots`: their counts including number 0, which is never allocated; `blocks`: maximum pages
    of a lane; `readers`: the recorded numbers of lanes of prefill calls, ascending; `chunk`: maximum tokens of such a lane;
    `lanes`: maximum lanes of a decode call; `loop_lanes` and `turns`: maximum lanes of a generate call and tokens per lane, 0 and 1
    without such a call.

    `several`: whether a prefill call may have consecutive lanes of one text.  `shared`: whether texts with equal beginnings may
    share pages.  `several` and `shared` are False if slots have states.  `ahead`: whether a second step may be planned before the
    first is finished; False if the first step decides whether a text must be read again.

    `vocabulary`: the number of tokens in a mask, 0 if calls support no restrictions.
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
        """Maximum tokens of a request, prompt and answer."""
        return min(self.blocks, self.pages - 1) * self.page

    @property
    def unit(self) -> int:
        """Tokens that are shared together: whole pages and whole chunks.  So a text is always split into the same chunks, and its
        results are bitwise equal."""
        return math.lcm(self.page, self.chunk)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The sampling parameters of a lane: the fields of Sampling in cgcompile/language_models/sampling.py."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    penalty: float = 1.0
    seed: int = 0
    alternatives: int = 0
    min_p: float = 0.0
    deferred: int = 0


class Adapter(NamedTuple):
    """The LoRA adapter of a request.  `place`: its number in the bundle's bank, 0 for none.  `number`: unique among all adapters
    that were ever at that place, so that their pages are not shared; 0 for none."""

    place: int
    number: int


NO_ADAPTER = Adapter(0, 0)


class Rules(Protocol):
    """Restrictions of the tokens of one answer.  `follow` is called once for every token, in the order of the text."""

    words: array[Any]
    """The mask of the next token, 32-bit words: a bit for every token, 1 if it is allowed."""
    failure: str | None
    """Why the rules can choose no further token."""

    def follow(self, place: int, token: int, *, fresh: bool) -> Mapping[int, float]:
        """Adds `token`, which is before `place` in the text, and writes the mask for the token at `place`.  Returns the biases that
        changed; with `fresh`, all biases."""

    def bias(self, token: int) -> float:
        """Returns the bias of a token's logit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """`prompt`: at least one token; `most`: maximum tokens to generate, at least one; `stop`: up to 8 tokens that end the answer;
    `rules`: restrictions, not shared with other requests; `forced`: the number of tokens that the rules force, which never end the
    answer; `adapter`: the LoRA adapter."""

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
        raise ValueError("a request needs at least one prompt token and max_tokens of at least 1")
    if len(request.stop) > STOPS:
        raise ValueError(f"{len(request.stop)} stop tokens; a request may have {STOPS}")
    if request.rules is not None and not limits.vocabulary:
        raise ValueError("the bundle has no entry `choose`, which restricts tokens: build it again")
    total = len(request.prompt) + request.most
    if total > limits.context:
        raise ValueError(f"prompt and max_tokens are {total} tokens together; the bundle was built for {limits.context}")


class Token(NamedTuple):
    """A generated token and its log-probability; if requested, alternatives with log-probabilities.  `reread`: the model must read
    the text again before this token, because it exceeded the original context of a LongRoPE model."""

    id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()
    reread: bool = False


class Lane(NamedTuple):
    """A request's part of a call: its new tokens `ids`, the number `start` of tokens that are already in `pages`, its slot, the
    maximum of tokens to generate, and the `length` of its prompt.

    `behind`: if it is 0 or more, the new token is the result of lane number `behind` in the previous call, and `ids` has a 0 for
    it.  `pages` grows with the request: a later step may append pages.

    `rules`: restrictions; None if there are none, or if the lane's result is not a token of the text.  `adapter`: the place of its
    adapter.
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
    """A call of the model.  Only in a prefill call may a request have several lanes, in the order of its text."""

    entry: Entry
    lanes: tuple[Lane, ...]


class Made(NamedTuple):
    """The results of a call: the last token of every lane; `rows` returns all tokens of every lane."""

    tokens: Sequence[int]
    rows: Callable[[], Sequence[Sequence[Token]]]


Call = Callable[[Made | None], Made]
"""A prepared call.  Its argument is the result of the previous call, None if there was none or it failed."""


class Progress(NamedTuple):
    """The tokens of a step for a request; `reason`: why it ended: "stop" (the last token is a stop token), "length", or None."""

    key: Hashable
    tokens: Sequence[Token]
    reason: Reason | None
