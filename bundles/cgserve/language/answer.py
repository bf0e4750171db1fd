"""Converts tokens to the client's output: text, log-probabilities, and the reason of the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..restrictions.tools import CallReader, ToolCall
from ..scheduling.requests import Progress, Token
from .tokenizer import Decode, Detokenizer, StopStrings


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer: its text, its tokens, the offset of its text in the answer, the reason if the answer ends here, and
    completed tool calls."""

    text: str
    tokens: tuple[Token, ...]
    offset: int
    reason: Literal["stop", "length", "tool_calls"] | None
    calls: tuple[ToolCall, ...] = ()


class Answer:
    """The text of one request.  `count`: tokens generated so far, up to a stop string."""

    def __init__(
        self, decode: Decode, prompt: Sequence[int], strings: Sequence[str], reader: CallReader | None = None, forced: int = 0,
        offset: int = 0,
    ) -> None:  # fmt: skip
        """`reader`: if the answer may call tools; `forced`: the number of prompt tokens before the answer that are also returned;
        `offset`: characters returned before."""
        self._reader, self._called, self._forced = reader, False, forced
        self._detokenizer, self._strings = Detokenizer(decode, prompt), StopStrings(strings)
        self._pending: list[Token] = []
        self._offset = offset
        self.count = 0

    def push(self, progress: Progress) -> Piece | None:
        """Returns the piece that the tokens add, or None.  Do not call it after a piece with a reason."""
        text, reason = "", progress.reason
        for number, token in enumerate(progress.tokens, 1):
            if self._forced:
                self._forced -= 1
                self._pending.append(token)
                text += self._detokenizer.push(token.id)
                continue
            self.count += 1
            if reason == "stop" and number == len(progress.tokens):
                break  # the text does not include the stop token
            self._pending.append(token)
            text += self._strings.push(self._detokenizer.push(token.id))
            if self._strings.matched:
                return self._piece(text, "stop")
        if reason is not None:
            text += self._strings.push(self._detokenizer.end())
            if self._strings.matched:
                reason = "stop"
            text += self._strings.end()
        return self._piece(text, reason) if text or reason is not None else None

    def _piece(self, text: str, reason: Literal["stop", "length", "tool_calls"] | None) -> Piece | None:
        calls: list[ToolCall] = []
        if self._reader is not None:
            text, calls = self._reader.push(text)
            if reason is not None:
                remaining, more_calls = self._reader.end()
                text, calls = text + remaining, calls + more_calls
            self._called = self._called or bool(calls)
            if reason == "stop" and self._called:
                reason = "tool_calls"
            if not (text or calls or reason):
                return None
        piece = Piece(text, tuple(self._pending), self._offset, reason, tuple(calls))
        self._pending = []
        self._offset += len(text)
        return piece
