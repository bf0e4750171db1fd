"""A request while it is served: its text so far, and its part of the cache."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .pages import Beginning
from .requests import Lane, Request, Sampling, Step


@dataclass(slots=True, eq=False)
class Text:
    """A request's `tokens`, and the number of tokens `ahead` that running calls generate.  `slot` is 0 while the request waits.

    `read`: number of tokens in its `pages` after all running calls; `goal`: `read` after its last prefill call.  `length`: of the
    prompt, or of the text that is read again.  `row`: its last lane in the running call.  `looping`: that call generates several
    tokens.

    The pages of its first `known` tokens are registered in `Pages`; `front` is the number of that beginning, or `root`.
    """

    key: Hashable
    request: Request
    tokens: list[int]
    read: int = 0
    ahead: int = 0
    goal: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    length: int = 0
    row: int = -1
    looping: bool = False
    front: int = 0
    known: int = 0

    @property
    def root(self) -> int:
        """The number of the empty beginning: 0 or less, different for every adapter."""
        return -self.request.adapter.number

    @property
    def reading(self) -> bool:
        """Whether a prefill call is next."""
        return self.read < self.goal

    @property
    def left(self) -> int:
        """The number of tokens that may still be requested."""
        return len(self.request.prompt) + self.request.most - len(self.tokens) - self.ahead

    @property
    def alone(self) -> bool:
        """Whether the text shares no pages and has one lane per call: a repetition penalty needs all tokens in the slot, and lanes
        of one call write to it in any order."""
        return self.request.sampling.penalty != 1.0

    def lane(self, ids: Sequence[int], start: int, most: int, behind: int = -1, *, makes: bool = True) -> Lane:
        """Returns its lane for `ids`, after the first `start` tokens; `makes`: whether the result is a token of the text."""
        request: Request = self.request
        sampling: Sampling = request.sampling
        rules = request.rules if makes else None
        place = request.adapter.place
        return Lane(self.key, ids, start, self.pages, self.slot, most, request.stop, sampling, self.length, behind, rules, place)


class Row(NamedTuple):
    """A lane of a running step, with the text's fields when the step was planned: the list `pages`, `read`, `front` and `known`.
    `makes`: whether the lane's result is a token of the text."""

    text: Text
    pages: list[int]
    makes: bool
    read: int
    front: int
    known: int


@dataclass(slots=True)
class Flight:
    """A running step: its lanes, and the beginnings that it writes to pages which may be shared later."""

    step: Step
    rows: list[Row]
    beginnings: list[tuple[Row, Beginning]]
