"""Text and tokens: loads tokenizer.json (`Language`), decodes tokens incrementally, and finds stop strings, which may consist of
several tokens.  Without torch and transformers."""

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

PREFIX_TOKENS = 6
"""Number of prompt tokens that are decoded before the first new token.  Some tokenizers decode a token differently at the beginning
of a text."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Decoding writes this character for bytes that are not a whole character."""

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Decodes tokens incrementally, and returns only whole characters.  The results of `push` and `end`, joined, are the text of
    all tokens after the prompt."""

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-PREFIX_TOKENS:])
        # the text between these two indices was returned; neither is inside a character
        self._begin, self._end = 0, len(self._ids)

    def push(self, token: int) -> str:
        """Returns the new text, or "" if the token ends inside a character."""
        self._ids.append(token)
        return self._new(end=False)

    def end(self) -> str:
        """Returns the remaining text, including an incomplete character."""
        return self._new(end=True)

    def _new(self, *, end: bool) -> str:
        returned, decoded = self._decode(self._ids[self._begin : self._end]), self._decode(self._ids[self._begin :])
        if (decoded.endswith(REPLACEMENT) and not end) or len(decoded) <= len(returned):
            return ""
        self._begin, self._end = self._end, len(self._ids)
        return decoded[len(returned) :]


class StopStrings:
    """Returns text up to the first stop string.  The result does not depend on how the text is split into pieces."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._tail = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Returns the text that is not in a stop string and cannot begin one.  Do not call it again once `matched` is set."""
        self._tail += text
        positions = [position for position in (self._tail.find(string) for string in self._strings) if position >= 0]
        if positions:
            self.matched = True
            emitted, self._tail = self._tail[: min(positions)], ""
            return emitted
        overlap = max((self._overlap(string) for string in self._strings), default=0)
        emitted, self._tail = self._tail[: len(self._tail) - overlap], self._tail[len(self._tail) - overlap :]
        return emitted

    def end(self) -> str:
        """Returns the text that was held back."""
        held_back, self._tail = self._tail, ""
        return held_back

    def _overlap(self, string: str) -> int:
        """Returns how many characters at the end of the buffer begin `string`."""
        return next((size for size in range(min(len(string) - 1, len(self._tail)), 0, -1) if self._tail.endswith(string[:size])), 0)


class Language:
    """The tokenizer and text settings of a folder in the Hub's layout: tokenizer.json and, if they exist, tokenizer_config.json,
    chat_template.jinja, generation_config.json and config.json."""

    def __init__(self, folder: str | Path, previous: Language | None = None) -> None:
        """`previous`: the Language of another version.  If its tokenizer.json is equal, its tokenizer is reused: the package
        tokenizers (0.23) never frees the 5 MB of a tokenizer's word cache.  Raises ValueError without tokenizer.json, or for an
        invalid chat template."""
        path = Path(folder)
        if not (path / "tokenizer.json").is_file():
            raise ValueError(f"{folder}: no tokenizer.json")
        file = (path / "tokenizer.json").read_bytes()
        self.digest = hashlib.sha256(file).digest()
        same = previous is not None and previous.digest == self.digest
        self._tokenizer: Tokenizer = previous._tokenizer if previous is not None and same else Tokenizer.from_buffer(file)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        settings, model, generation = [read(path / f"{name}.json") for name in ("tokenizer_config", "config", "generation_config")]
        tokens = {name: special_token(value) for name, value in settings.items() if name.endswith("_token")}
        special = {name: token for name, token in tokens.items() if token}
        text = model.get("text_config", model)
        self.positions: int | None = text.get("max_position_embeddings")
        self.stop = self._stop_tokens(generation.get("eos_token_id", text.get("eos_token_id")), special.get("eos_token"))
        self.sampling = sampling_defaults(generation)
        """Default sampling from generation_config.json, by the fields of Sampling."""
        self.pad = self._tokenizer.token_to_id(special.get("pad_token", "")) or 0
        self.labels = class_labels(model)
        """The class labels of a classifier from config.json, else ()."""
        self.size = self._tokenizer.get_vocab_size()
        self.longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        """Length in characters of the longest vocabulary entry.  The text of a token is not longer than its entry."""
        template_file = path / "chat_template.jinja"
        template = template_file.read_text("utf-8") if template_file.is_file() else default_template(settings.get("chat_template"))
        self.chat: ChatTemplate | None = None
        if template:
            from .chat import ChatTemplate  # only chats need Jinja

            self.chat = ChatTemplate(template, special)
        self.tool_form = form = tool_form(template)
        """How the chat template writes tool calls."""
        if (tag := self._tokenizer.token_to_id(form.begin.strip())) is not None:
            self.tool_form = replace(form, shown=bool(self.text([tag])))

    def tokens(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Returns the tokens of a text.  `special`: adds the tokenizer's special tokens, which a chat template writes itself."""
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=special)  # `encode` holds the GIL
        return tuple(encoding.ids)

    @property
    def source(self) -> str:
        """The contents of tokenizer.json."""
        source: str = self._tokenizer.to_str()
        return source

    def encode(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Returns tokens and type ids of texts or pairs, with the tokenizer's special tokens."""
        return [(encoding.ids, encoding.type_ids) for encoding in self._tokenizer.encode_batch(list(texts))]

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        return self._tokenizer.decode(list(tokens))

    def token_text(self, token: int) -> str:
        """Returns the text of a single token, special or not.  If it is a part of a character, returns its vocabulary entry."""
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return self._tokenizer.id_to_token(token) or text if REPLACEMENT in text else text

    def bytes_of(self, token: int) -> list[int] | None:
        """Returns the bytes of a token's text, or None if the token is a part of a character."""
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return None if REPLACEMENT in text else list(text.encode())

    def _stop_tokens(self, ids: int | list[int] | None, name: str | None) -> tuple[int, ...]:
        tokens = [] if ids is None else [ids] if isinstance(ids, int) else ids
        if not tokens and name is not None and (number := self._tokenizer.token_to_id(name)) is not None:
            tokens = [number]
        return tuple(tokens)


def read(path: Path) -> dict[str, Any]:
    """Returns the JSON object of a file, {} if it does not exist."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    """Returns the sampling parameters of a generation_config.json.  Ignores values that are not numbers."""
    names = {
        "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty",
    }  # fmt: skip
    sampling = {field: generation[name] for name, field in names.items() if type(generation.get(name)) in (int, float)}
    if "top_k" in sampling:
        sampling["top_k"] = max(0, int(sampling["top_k"]))
    return {"temperature": 0.0, **sampling} if generation.get("do_sample") is False and not sampling else sampling


def class_labels(config: dict[str, Any]) -> tuple[str, ...]:
    """Returns the class labels of a config.json, in order, or () if the model is not a classifier."""
    if not any(str(architecture).endswith("ForSequenceClassification") for architecture in config.get("architectures") or ()):
        return ()
    labels = config.get("id2label") or {str(number): f"LABEL_{number}" for number in range(config.get("num_labels", 2))}
    return tuple([str(labels[number]) for number in sorted(labels, key=int)])


def special_token(value: Any) -> str:
    """Returns the text of a special token in tokenizer_config.json.  `value`: a string, or an object with `content`."""
    return value.get("content", "") if isinstance(value, dict) else value if isinstance(value, str) else ""


def default_template(template: Any) -> str:
    """Returns the chat template of tokenizer_config.json.  If it lists several, returns the one named `default`."""
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry.get("name") == "default"), "")
    return template or ""
