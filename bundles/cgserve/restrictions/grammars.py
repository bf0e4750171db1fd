"""Grammars over a model's tokens, by llguidance: which tokens may come next in a text that a JSON schema describes.

llguidance needs no torch.  It comes with the extra `grammar`, and is imported when a request asks for a grammar.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The white space of JSON in answers.  With arbitrary white space a model could write white space forever."""

ANYTHING = {"type": "object"}
"""The schema of `json_object`."""


LARGEST = 1 << 16
"""Maximum number of characters of a grammar.  The engine takes seconds for a grammar a few times larger."""


class MissingEngine(Exception):
    """llguidance is not installed."""


class Matcher(Protocol):
    """How far a text has been matched with its grammar."""

    def take(self, token: int) -> str | None:
        """Adds a token.  Returns the error of the engine, or None."""

    def write(self, words: array[Any]) -> str | None:
        """Writes the mask of the next token.  Returns the error of the engine, or None."""


class GrammarMatcher:
    """A matcher of llguidance.  The engine releases the interpreter's lock while it computes."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> GrammarMatcher:
        """Returns a copy for another text of the same grammar."""
        return GrammarMatcher(self._matcher.deep_copy())

    def take(self, token: int) -> str | None:
        """As `Matcher.take`.  Tokens after the end of the grammar are ignored."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return None
        return None if self._matcher.consume_token(token) else one_line(self._matcher.get_error())

    def write(self, words: array[Any]) -> str | None:
        """As `Matcher.write`.  After the end of the grammar, the mask allows the tokens that end a text."""
        self._matcher.unsafe_compute_mask_ptr(words.buffer_info()[0], len(words) * words.itemsize)
        return one_line(self._matcher.get_error()) if self._matcher.is_error() else None


class Grammars:
    """The grammar engine over the tokens of a model."""

    def __init__(self, tokenizer: str, vocabulary: int, ends: Sequence[int]) -> None:
        """`tokenizer`: the contents of tokenizer.json; `vocabulary`: number of tokens; `ends`: tokens that end a text.  Raises
        MissingEngine, and ValueError for a tokenizer that the engine does not support."""
        try:
            import llguidance
        except ImportError as error:
            raise MissingEngine("needs llguidance: pip install 'cgcompile[grammar]'") from error
        if not ends:
            raise ValueError("the model's folder names no token that ends a text")
        self._engine = llguidance
        self._tokens = llguidance.LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(ends))

    def special(self, tags: Sequence[str]) -> dict[str, int]:
        """Returns the token of every tag that is a single special token of the engine; omits the other tags."""
        special_tokens = {}
        for tag in tags:
            tokens = self._tokens.tokenize_str(tag, parse_special=True)
            if len(tokens) == 1 and self._tokens.is_special_token(tokens[0]):
                special_tokens[tag] = tokens[0]
        return special_tokens

    def matcher(self, grammar: str) -> GrammarMatcher:
        """Returns a matcher at the start of a text.  Raises ValueError for a grammar that the engine does not support."""
        if len(grammar) > LARGEST:
            raise ValueError(f"{len(grammar)} characters of schemas; at most {LARGEST} are allowed")
        matcher = self._engine.LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(one_line(matcher.get_error()))
        return GrammarMatcher(matcher)


def schema_rule(name: str, schema: Mapping[str, Any]) -> str:
    """Returns a grammar rule for the JSON of a schema."""
    return f"{name}: %json {json.dumps({**schema, 'x-guidance': SPACING}, ensure_ascii=False)}"


def one_line(text: str) -> str:
    """Returns the first part of an engine's message, which precedes the grammar and the engine's state."""
    message = re.split(r"<state>|\n\s*\d+ \| ", text)[0]
    return " ".join(message.rpartition("failed to compile JSON schema: ")[2].split()) or "the grammar engine gave up"
