"""From text to tokens and back: a tokenizer.json, text as tokens arrive, stop strings.  Without torch and transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from ..restrictions.tools import tool_form

if TYPE_CHECKING:
    from .chat import ChatTemplate

CONTEXT = 6
"""Tokens before the first new one that are decoded with it: some tokenizers write a token otherwise where a text begins."""

BROKEN = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """The text of tokens as they come, by whole characters: what `push` and `end` give, together, is what `decode` makes of all of
    them behind the prompt."""

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-CONTEXT:])
        self._begin, self._told = (
            0,
            len(self._ids),
        )  # the text from `begin` to `told` has been given; both are borders of characters

    def push(self, token: int) -> str:
        """The text that is certain now: "" where the token ends inside a character."""
        self._ids.append(token)
        return self._new(end=False)

    def end(self) -> str:
        """What is left, an unfinished character among it."""
        return self._new(end=True)

    def _new(self, *, end: bool) -> str:
        before, after = self._decode(self._ids[self._begin : self._told]), self._decode(self._ids[self._begin :])
        if (after.endswith(BROKEN) and not end) or len(after) <= len(before):
            return ""
        self._begin, self._told = self._told, len(self._ids)
        return after[len(before) :]


class StopStrings:
    """Text up to the first of some strings, wherever pieces of text are cut."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """The text that belongs to no stop string, nor may begin one.  Sets `matched` where one is whole: nothing comes after."""
        self._held += text
        places = [place for place in (self._held.find(string) for string in self._strings) if place >= 0]
        if places:
            self.matched = True
            emitted, self._held = self._held[: min(places)], ""
            return emitted
        keep = max((self._overlap(string) for string in self._strings), default=0)
        emitted, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return emitted

    def end(self) -> str:
        """What was held back, because a stop string might have begun."""
        rest, self._held = self._held, ""
        return rest

    def _overlap(self, string: str) -> int:
        """How many characters at the end of what is held begin `string`."""
        return next((size for size in range(min(len(string) - 1, len(self._held)), 0, -1) if self._held.endswith(string[:size])), 0)


class Language:
    """What a folder in the Hub's layout says of text: tokenizer.json, and where they are, tokenizer_config.json,
    chat_template.jinja, generation_config.json and config.json."""

    def __init__(self, folder: str | Path, before: Language | None = None) -> None:
        """`before`: that of another version, whose tokenizer is taken if it is the same.  tokenizers (0.23) never frees the memory
        in which it keeps the tokens of words: 5 MB for each tokenizer that had work.  Raises ValueError for a folder without a
        tokenizer.json, or whose chat template is no Jinja."""
        place = Path(folder)
        if not (place / "tokenizer.json").is_file():
            raise ValueError(f"{folder}: no tokenizer.json")
        file = (place / "tokenizer.json").read_bytes()
        self.digest = hashlib.sha256(file).digest()
        same = before is not None and before.digest == self.digest
        self._tokenizer: Tokenizer = before._tokenizer if before is not None and same else Tokenizer.from_buffer(file)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        settings, model, generation = [read(place / f"{name}.json") for name in ("tokenizer_config", "config", "generation_config")]
        special = {name: named(value) for name, value in settings.items() if name.endswith("_token") and named(value)}
        text = model.get("text_config", model)
        self.positions: int | None = text.get("max_position_embeddings")
        self.stop = self._stop_tokens(generation.get("eos_token_id", text.get("eos_token_id")), special.get("eos_token"))
        self.sampling = defaults_of(generation)
        """How tokens are chosen where a request does not say: what generation_config.json says, by the fields of Sampling."""
        self.pad = self._tokenizer.token_to_id(special.get("pad_token", "")) or 0
        self.labels = labels_of(model)
        """The classes of a classifier, by its config.json; () where it is none."""
        self.size = self._tokenizer.get_vocab_size()
        self.longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        """Characters of a token at the most, as the vocabulary spells them: no fewer than those of its text."""
        written = place / "chat_template.jinja"
        template = written.read_text("utf-8") if written.is_file() else chosen(settings.get("chat_template"))
        self.chat: ChatTemplate | None = None
        if template:
            from .chat import ChatTemplate  # Jinja is for chats alone

            self.chat = ChatTemplate(template, special)
        self.tool_form = form = tool_form(template)
        """How the chat template writes calls of tools."""
        if (tag := self._tokenizer.token_to_id(form.begin.strip())) is not None:
            self.tool_form = replace(form, shown=bool(self.text([tag])))

    def tokens(self, text: str, *, special: bool) -> tuple[int, ...]:
        """The tokens of a text; `special`: with those that the tokenizer puts around it, which a chat template writes itself."""
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=special)  # `encode` keeps the interpreter to itself
        return tuple(encoding.ids)

    @property
    def source(self) -> str:
        """The tokenizer, as tokenizer.json has it."""
        source: str = self._tokenizer.to_str()
        return source

    def encoded(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """The tokens of texts, or of pairs of them, with those that the tokenizer puts around; and of which text of a pair each
        is."""
        return [(encoding.ids, encoding.type_ids) for encoding in self._tokenizer.encode_batch(list(texts))]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self._tokenizer.decode(list(tokens))

    def one(self, token: int) -> str:
        """A token as it is shown by itself, special or not; one that is a part of a character as the vocabulary spells it."""
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return self._tokenizer.id_to_token(token) or text if BROKEN in text else text

    def bytes_of(self, token: int) -> list[int] | None:
        """The bytes of a token's text; None of one that is a part of a character."""
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return None if BROKEN in text else list(text.encode())

    def _stop_tokens(self, ids: int | list[int] | None, name: str | None) -> tuple[int, ...]:
        tokens = [] if ids is None else [ids] if isinstance(ids, int) else ids
        if not tokens and name is not None and (number := self._tokenizer.token_to_id(name)) is not None:
            tokens = [number]
        return tuple(tokens)


def read(path: Path) -> dict[str, Any]:
    """An object of JSON, empty where there is no file."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def defaults_of(generation: dict[str, Any]) -> dict[str, float]:
    """The sampling of a generation_config.json; what is no number there counts as not said."""
    names = {
        "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty",
    }  # fmt: skip
    sampling = {ours: generation[theirs] for theirs, ours in names.items() if type(generation.get(theirs)) in (int, float)}
    if "top_k" in sampling:
        sampling["top_k"] = max(0, int(sampling["top_k"]))
    return {"temperature": 0.0, **sampling} if generation.get("do_sample") is False and not sampling else sampling


def labels_of(config: dict[str, Any]) -> tuple[str, ...]:
    """The classes of a config.json, in their order."""
    if not any(str(architecture).endswith("ForSequenceClassification") for architecture in config.get("architectures") or ()):
        return ()
    labels = config.get("id2label") or {str(number): f"LABEL_{number}" for number in range(config.get("num_labels", 2))}
    return tuple([str(labels[number]) for number in sorted(labels, key=int)])


def named(value: Any) -> str:
    """A token of tokenizer_config.json, which writes it as a text or as an object."""
    return value.get("content", "") if isinstance(value, dict) else value if isinstance(value, str) else ""


def chosen(template: Any) -> str:
    """The template of tokenizer_config.json: the one called `default` where it lists several."""
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry.get("name") == "default"), "")
    return template or ""
