"""A request while it is served: its text so far, and what it has of the cache."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .pages import Beginning
from .requests import Lane, Request, Sampling, Step


@dataclass(slots=True, eq=False)
class Text:
    """A request's `tokens`, and `ahead` more that calls under way make.  `slot` is 0 while it waits.

    `read`: tokens that its `pages` hold, once all calls under way have ended; `goal`: those that prefill calls read.  `length`: of
    the prompt, or of the text that was read again in its place.  `row`: its last lane in the call under way.  `looping`: that call
    makes several tokens.

    Of its first `known` tokens the pages are known, or will be: `front` is the number of that beginning.  With none it is `root`.
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
        """What stands for no beginning: a number that texts of the same adapter alone have, 0 or less."""
        return -self.request.adapter.number

    @property
    def reading(self) -> bool:
        """Whether a prefill call comes next."""
        return self.read < self.goal

    @property
    def left(self) -> int:
        """Tokens that may still be asked for."""
        return len(self.request.prompt) + self.request.most - len(self.tokens) - self.ahead

    @property
    def alone(self) -> bool:
        """Whether its slot has to see every token: which ones the text has counts, and lanes of one call write it in no order."""
        return self.request.sampling.penalty != 1.0

    def lane(self, ids: Sequence[int], start: int, most: int, behind: int = -1, *, makes: bool = True) -> Lane:
        """Its lane for `ids`, behind the first `start` tokens; `makes`: whether the token behind them is one of the text."""
        asked: Request = self.request
        sampling: Sampling = asked.sampling
        rules = asked.rules if makes else None
        place = asked.adapter.place
        return Lane(self.key, ids, start, self.pages, self.slot, most, asked.stop, sampling, self.length, behind, rules, place)


class Row(NamedTuple):
    """A lane of a step under way, as its text was when the step was planned: the `pages` list that it had, and what it had read.
    `makes`: whether what the lane makes is a token of the text."""

    text: Text
    pages: list[int]
    makes: bool
    read: int
    front: int
    known: int


@dataclass(slots=True)
class Flight:
    """A step that was given out and not yet finished: its lanes, and what it writes to pages that may be shared later."""

    step: Step
    rows: list[Row]
    beginnings: list[tuple[Row, Beginning]]
