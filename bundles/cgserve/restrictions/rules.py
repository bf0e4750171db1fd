"""The rules of one answer: for each token, which tokens are allowed and which are preferred."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .grammars import Matcher

WORD_BITS = 32
ALL = -1
"""A word of a mask that allows all tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """Restrictions of a body in addition to a grammar.  `biases`: added to the logits of tokens; `presence`: subtracted from the
    logit of a token that occurs in the answer; `frequency`: subtracted for each occurrence; `least`: minimum tokens of the
    answer."""

    biases: Mapping[int, float] = field(default_factory=dict)
    presence: float = 0.0
    frequency: float = 0.0
    least: int = 0

    def __bool__(self) -> bool:
        return bool(self.biases or self.presence or self.frequency or self.least)


class TokenRules:
    """`scheduling.requests.Rules` of one request.  `words`: the mask of the next token; `failure`: why the grammar engine failed;
    then only tokens that end the answer are allowed."""

    def __init__(
        self, vocabulary: int, prompt: int, wishes: Wishes, ends: Sequence[int], matcher: Matcher | None,
        forced: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`vocabulary`: number of tokens of the model; `prompt`: number of prompt tokens before the first generated one; `ends`:
        tokens that end the answer; `forced`: prompt tokens that are generated one by one, before the answer."""
        self.words: array[Any] = array("i", [ALL]) * -(-vocabulary // WORD_BITS)
        self.failure: str | None = None
        self._prompt, self._wishes, self._ends, self._matcher = prompt, wishes, ends, matcher
        self._forced = forced
        self._counts: dict[int, int] = {}
        self._taken = 0

    def follow(self, place: int, token: int, *, fresh: bool) -> Mapping[int, float]:
        """Adds the token before `place`, unless it was added before: a text that has lost its pages is read again."""
        count, changed = place - self._prompt, set[int]()
        if count == self._taken + 1:
            self._taken = count
            if count > len(self._forced):
                changed = self._take(token)
        elif count != self._taken:
            raise AssertionError(f"{count} tokens behind the prompt, after {self._taken}")
        if fresh:
            changed = {*self._wishes.biases, *self._counts}
        self._write(count)
        return {token: self.bias(token) for token in changed}

    def _take(self, token: int) -> set[int]:
        """Adds a token of the answer, and returns the tokens whose biases change."""
        if self._matcher is not None:
            self.failure = self.failure or self._matcher.take(token)
        if not (self._wishes.presence or self._wishes.frequency):
            return set()
        self._counts[token] = self._counts.get(token, 0) + 1
        return {token}

    def bias(self, token: int) -> float:
        wishes, count = self._wishes, self._counts.get(token, 0)
        return wishes.biases.get(token, 0.0) - (wishes.presence + wishes.frequency * count if count else 0.0)

    def _write(self, count: int) -> None:
        """Writes the mask of the next token."""
        if count < len(self._forced):
            self.words[:] = array("i", [0]) * len(self.words)
            self._allow(self._forced[count : count + 1])
            return
        if self._matcher is not None and self.failure is None:
            self.failure = self._matcher.write(self.words)
            if self.failure is None and not any(self.words):
                self.failure = "the model has no token that may come next"
        if self.failure is not None:
            self.words[:] = array("i", [0]) * len(self.words)
            self._allow(self._ends)
        elif self._matcher is None:
            self.words[:] = array("i", [ALL]) * len(self.words)
        if count - len(self._forced) < self._wishes.least and self.failure is None:
            mask = self.words[:]
            self._forbid(self._ends)
            if not any(self.words):
                self.words = mask  # the grammar has ended: only an end token is allowed

    def _allow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            bit = 1 << token % WORD_BITS
            self.words[token // WORD_BITS] = signed((self.words[token // WORD_BITS] | bit) & 0xFFFFFFFF)

    def _forbid(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            bit = 1 << token % WORD_BITS
            self.words[token // WORD_BITS] = signed(self.words[token // WORD_BITS] & ~bit & 0xFFFFFFFF)


def signed(word: int) -> int:
    """Converts a word of 32 bits to int32."""
    return word - (word >> 31 << 32)
