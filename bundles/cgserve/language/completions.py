"""OpenAI's completions and chat completions: reads request bodies and makes responses.  Pure functions.

Unsupported features are refused with the name of the field.  Fields that do not affect tokens are ignored.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..restrictions.fields import biases_of, schema_of, toolbox_of
from ..restrictions.rules import Wishes
from ..restrictions.tools import Toolbox
from .answer import Piece
from .tokenizer import Language

Prompt = str | tuple[int, ...]

COMMON = {
    "model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "n", "seed", "stop",
    "stop_token_ids", "ignore_eos", "min_p", "min_tokens", "logit_bias", "presence_penalty", "frequency_penalty", "response_format",
}  # fmt: skip
COMPLETION = COMMON | {"prompt", "logprobs", "echo", "add_special_tokens"}
CHAT = COMMON | {
    "messages", "max_completion_tokens", "logprobs", "top_logprobs", "chat_template_kwargs", "tools", "tool_choice",
    "parallel_tool_calls",
}  # fmt: skip
PASSED_OVER = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id",
}  # fmt: skip
"""Fields that do not affect tokens."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,), "priority": (0,),
    "suffix": ("",), "best_of": (1,), "echo": (False,), "use_beam_search": (False,), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "return_token_ids": (False,),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "add_special_tokens": (False,),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"), "bad_words": ([],),
    "parallel_tool_calls": (True, False), "modalities": (["text"],),
}  # fmt: skip
"""Unsupported fields, with the values that request nothing; null also requests nothing."""

WHY = {"functions": "it is tools now", "function_call": "it is tool_choice now"}

CHOICES, STOP_STRINGS, ALTERNATIVES, COMPLETION_TOKENS = 128, 4, {"completion": 5, "chat": 20}, 16
"""Maximum choices, stop strings and alternatives, and the default `max_tokens` of a completion, as in OpenAI's API."""


class Refusal(Exception):
    """An error response: HTTP status, text, the field, OpenAI's `code`, and the seconds until a retry (0: never)."""

    def __init__(self, status: int, text: str, field: str | None = None, code: str | None = None, retry_after: int = 0) -> None:
        super().__init__(text)
        self.status, self.field, self.code, self.retry_after = status, field, code, retry_after

    def body(self) -> dict[str, Any]:
        """Returns the error in OpenAI's format."""
        kinds = {429: "rate_limit_error", 404: "not_found_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedBody:
    """A parsed body.  `most`: maximum tokens of a choice, None for no limit; `alternatives`: None without log-probabilities;
    `usage`: whether a stream ends with the counts of tokens.  `sampling`: only values of the body, which override the model's
    defaults.  `echo`: the answer begins with the prompt; `special`: the tokenizer adds special tokens to a text; `stop_tokens`:
    tokens that end an answer, in addition to the model's stop tokens; `ignore_end`: the model's stop tokens do not end an answer;
    `template`: arguments of the chat template; `schema`: the JSON schema of the answer; `wishes`: other restrictions of its tokens;
    `toolbox`: the tools that it may call."""

    chat: bool
    model: str | None
    prompts: tuple[Prompt, ...]
    messages: tuple[dict[str, Any], ...]
    most: int | None
    choices: int
    stop: tuple[str, ...]
    sampling: Mapping[str, float]
    alternatives: int | None
    stream: bool
    usage: bool
    echo: bool = False
    special: bool = True
    stop_tokens: tuple[int, ...] = ()
    ignore_end: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None
    wishes: Wishes = field(default_factory=Wishes)
    toolbox: Toolbox = field(default_factory=Toolbox)

    @property
    def scored(self) -> bool:
        """Whether the prompt's tokens are generated one by one, like those of an answer.  This is necessary if the response
        contains their log-probabilities, or only the prompt."""
        return self.echo and (self.alternatives is not None or self.most == 0)


# --- request bodies ------------------------------------------------------------------------------------------------


def read_request(text: bytes, *, chat: bool) -> ParsedBody:
    """Parses a body.  Raises Refusal."""
    body = object_of(text)
    fields = (CHAT if chat else COMPLETION) | PASSED_OVER
    for name, value in body.items():
        if name in fields or value in NEUTRAL.get(name, ()):
            continue
        if name in NEUTRAL:
            why = f": {WHY[name]}" if name in WHY else ""
            raise Refusal(400, f"{name}: this server does not do that{why}", name, "unsupported_parameter")
        raise Refusal(400, f"{name}: no such field", name, "unknown_parameter")
    options = of_kind(body, "stream_options", dict, {}, "an object")
    echo = not chat and of_kind(body, "echo", bool, False, "true or false")
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    return ParsedBody(
        chat=chat,
        model=of_kind(body, "model", str, None, "a string"),
        prompts=() if chat else prompts_of(body.get("prompt")),
        messages=messages_of(body.get("messages")) if chat else (),
        most=whole(body, limit, 0 if echo else 1, 1 << 31, None if chat else COMPLETION_TOKENS),
        choices=whole(body, "n", 1, CHOICES, 1),
        stop=stop_of(body.get("stop", [])),
        sampling=sampling_of(body),
        alternatives=alternatives_of(body, chat=chat),
        stream=of_kind(body, "stream", bool, False, "true or false"),
        usage=of_kind(options, "include_usage", bool, False, "true or false"),
        echo=echo,
        special=of_kind(body, "add_special_tokens", bool, True, "true or false"),
        stop_tokens=stop_tokens_of(body.get("stop_token_ids", [])),
        ignore_end=of_kind(body, "ignore_eos", bool, False, "true or false"),
        template=of_kind(body, "chat_template_kwargs", dict, {}, "an object"),
        schema=read_by(schema_of, body.get("response_format", {"type": "text"}), "response_format"),
        wishes=wishes_of(body),
        toolbox=read_by(toolbox_of, body, "tools") if chat else Toolbox(),
    )  # fmt: skip


def read_by(read: Callable[[Any], Any], field_value: Any, name: str) -> Any:
    """Calls a reader for a field.  Raises Refusal for its ValueError."""
    try:
        return read(field_value)
    except ValueError as error:
        raise Refusal(400, str(error), name) from None


def wishes_of(body: dict[str, Any]) -> Wishes:
    """Reads biases, penalties by count and the minimum length of the answer.  Raises Refusal."""
    return Wishes(
        biases=read_by(biases_of, body.get("logit_bias", {}), "logit_bias"),
        presence=number(body, "presence_penalty", -2.0, 2.0, 0.0),
        frequency=number(body, "frequency_penalty", -2.0, 2.0, 0.0),
        least=whole(body, "min_tokens", 0, 1 << 31, 0),
    )


def object_of(text: bytes) -> dict[str, Any]:
    """Parses a body as a JSON object and drops null fields.  Raises Refusal."""
    try:
        body = json.loads(text)
        if b"\\u" in text:  # JSON allows half a surrogate pair, but text does not
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise Refusal(400, "the body is not a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def sampling_of(body: dict[str, Any]) -> dict[str, float]:
    """Reads the sampling parameters, by the fields of Sampling.  Raises Refusal."""
    sampling: dict[str, float] = {"seed": int.from_bytes(os.urandom(4), "little")}
    for name, field_name, high in (("temperature", "temperature", 2.0), ("top_p", "top_p", 1.0), ("min_p", "min_p", 1.0)):
        if name in body:
            sampling[field_name] = number(body, name, 0.0, high, 1.0)
    if "repetition_penalty" in body:
        sampling["penalty"] = number(body, "repetition_penalty", 0.01, 100.0, 1.0)
    if "top_k" in body:
        sampling["top_k"] = max(0, whole(body, "top_k", -1, 1 << 31, 0))
    if "seed" in body:
        sampling["seed"] = whole(body, "seed", -(1 << 63), (1 << 63) - 1, 0) & 0xFFFFFFFF
    return sampling


def stop_tokens_of(tokens: Any) -> tuple[int, ...]:
    """Reads tokens that end an answer.  Raises Refusal."""
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise Refusal(400, "stop_token_ids: expected a list of tokens", "stop_token_ids")
    return tuple(tokens)


def of_kind(body: dict[str, Any], name: str, kind: type, default: Any, words: str) -> Any:
    """Returns a field of one type.  Raises Refusal."""
    value = body.get(name, default)
    if name in body and not isinstance(value, kind):
        raise Refusal(400, f"{name}: expected {words}", name)
    return value


def whole(body: dict[str, Any], name: str, low: int, high: int, default: Any) -> Any:
    """Returns an integer field within bounds.  Raises Refusal."""
    value = body.get(name, default)
    if name in body and (type(value) is not int or not low <= value <= high):
        raise Refusal(400, f"{name}: expected a whole number from {low} to {high}", name)
    return value


def number(body: dict[str, Any], name: str, low: float, high: float, default: float) -> float:
    """Returns a number field within bounds.  Raises Refusal."""
    value = body.get(name, default)
    if type(value) not in (int, float) or not low <= value <= high:
        raise Refusal(400, f"{name}: expected a number from {low:g} to {high:g}", name)
    return float(value)


def prompts_of(prompt: Any) -> tuple[Prompt, ...]:
    """Reads a text, tokens, or a list of either.  Raises Refusal."""
    entries = prompt if isinstance(prompt, list) and prompt and not all(type(token) is int for token in prompt) else [prompt]
    prompts: list[Prompt] = []
    for entry in entries:
        if isinstance(entry, str):
            prompts.append(entry)
        elif isinstance(entry, list) and entry and all(type(token) is int for token in entry):
            prompts.append(tuple(entry))
        else:
            raise Refusal(400, "prompt: expected a string, a list of tokens, or a list of these", "prompt")
    return tuple(prompts)


def messages_of(messages: Any) -> tuple[dict[str, Any], ...]:
    """Reads messages with a role and a text; text parts of a content are joined.  Raises Refusal."""
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, "messages: expected a list of messages", "messages")
    conversation = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refusal(400, f"{where}: expected an object with a role and a content", "messages")
        content = message.get("content")
        if content is None and message["role"] == "assistant":
            content = ""
        if isinstance(content, list) and all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
        ):
            content = "".join([part["text"] for part in content])
        if not isinstance(content, str):
            raise Refusal(400, f"{where}.content: expected a string, or parts of type text", "messages")
        conversation.append({**message, "content": content})
    return tuple(conversation)


def stop_of(stop: Any) -> tuple[str, ...]:
    """Reads one stop string or several.  Raises Refusal."""
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or len(strings) > STOP_STRINGS or not all(isinstance(text, str) and text for text in strings):
        raise Refusal(400, f"stop: expected a string, or up to {STOP_STRINGS}", "stop")
    return tuple(strings)


def alternatives_of(body: dict[str, Any], *, chat: bool) -> int | None:
    """Returns the number of alternatives, None if no log-probabilities are requested.  Raises Refusal."""
    if not chat:
        logprobs: int | None = whole(body, "logprobs", 0, ALTERNATIVES["completion"], None)
        return logprobs
    enabled = of_kind(body, "logprobs", bool, False, "true or false")
    count: int = whole(body, "top_logprobs", 0, ALTERNATIVES["chat"], 0)
    if count and not enabled:
        raise Refusal(400, "top_logprobs: only with logprobs true", "top_logprobs")
    return count if enabled else None


# --- responses -----------------------------------------------------------------------------------------------------


def with_echo(choice_json: dict[str, Any], prompt: Sequence[int], language: Language) -> dict[str, Any]:
    """Puts the tokens of a prompt before a completion's choice; their log-probabilities are unknown."""
    text = language.text(prompt)
    choice_json = choice_json | {"text": text + choice_json["text"]}
    if choice_json["logprobs"] is None:
        return choice_json
    prompt_tokens, unknown = [language.token_text(token) for token in prompt], [None] * len(prompt)
    answer = choice_json["logprobs"]
    logprobs = {
        "tokens": prompt_tokens + answer["tokens"], "token_logprobs": unknown + answer["token_logprobs"],
        "top_logprobs": unknown + answer["top_logprobs"],
        "text_offset": [len("".join(prompt_tokens[:count])) for count in range(len(prompt_tokens))] + answer["text_offset"],
    }  # fmt: skip
    return choice_json | {"logprobs": logprobs}


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def choice(parsed: ParsedBody, index: int, piece: Piece, language: Language, *, first: bool = False) -> dict[str, Any]:
    """Returns a choice for a whole answer, or for one piece of a stream.  `first`: the first piece of a stream, which has the
    role."""
    logprobs = None if parsed.alternatives is None else (chat_logprobs if parsed.chat else logprobs_of)(piece, language)
    choice_json: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": piece.reason}
    if not parsed.chat:
        return choice_json | {"text": piece.text}
    calls = [  # Mistral's templates only accept ids of nine letters and digits
        {"id": uuid.uuid4().hex[:9], "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in piece.calls
    ]
    content = {} if calls and not piece.text else {"content": piece.text}
    if parsed.stream:
        call_rows = {"tool_calls": [{"index": call.index, **row} for call, row in zip(piece.calls, calls, strict=True)]}
        return choice_json | {"delta": ({"role": "assistant"} if first else {}) | content | (call_rows if calls else {})}
    message = {"role": "assistant", "content": None, "refusal": None} | content
    return choice_json | {"message": message | ({"tool_calls": calls} if calls else {})}


def finite(logprob: float) -> float:
    """Replaces -inf by -9999, as OpenAI does: JSON has no infinity."""
    return logprob if logprob > -9999.0 else -9999.0


def logprobs_of(piece: Piece, language: Language) -> dict[str, Any]:
    """Returns a completion's log-probabilities as four lists; offsets are sums of the lengths of the tokens' texts."""
    tokens = [language.token_text(token.id) for token in piece.tokens]
    offsets, offset = [], piece.offset
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    best = [{language.token_text(other): finite(logprob) for other, logprob in token.alternatives} for token in piece.tokens]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(token.logprob) for token in piece.tokens],
        "top_logprobs": best,
        "text_offset": offsets,
    }


def chat_logprobs(piece: Piece, language: Language) -> dict[str, Any]:
    """Returns a chat completion's log-probabilities as a list of tokens."""

    def token_logprob(token: int, logprob: float) -> dict[str, Any]:
        return {"token": language.token_text(token), "logprob": finite(logprob), "bytes": language.bytes_of(token)}

    content = [
        token_logprob(token.id, token.logprob) | {"top_logprobs": [token_logprob(*other) for other in token.alternatives]}
        for token in piece.tokens
    ]
    return {"content": content, "refusal": None}


def joined(pieces: Sequence[Piece]) -> Piece:
    """Joins all pieces to the whole answer."""
    tokens = tuple([token for piece in pieces for token in piece.tokens])
    calls = tuple([call for piece in pieces for call in piece.calls])
    return Piece("".join([piece.text for piece in pieces]), tokens, pieces[0].offset, pieces[-1].reason, calls)
