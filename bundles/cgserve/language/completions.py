"""OpenAI's completions and chat completions: what a body asks for, and what is answered.  Values in, values out.

What this server does not do is refused by name, where the body asks for it; a field that changes no token is passed over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .answer import Piece
from .scheduler import Sampling
from .text import Language

Prompt = str | tuple[int, ...]

COMMON = (
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "n",
    "seed",
    "stop",
)
COMPLETION = {*COMMON, "prompt", "logprobs"}
CHAT = {*COMMON, "messages", "max_completion_tokens", "logprobs", "top_logprobs"}
PASSED_OVER = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "echo": (False,), "suffix": ("",), "best_of": (1,),
    "tools": ([],), "tool_choice": ("none",), "response_format": ({"type": "text"},), "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
}  # fmt: skip
"""What is not done, and the values that ask for nothing; null does, too."""

CHOICES, STOP_STRINGS, ALTERNATIVES, COMPLETION_TOKENS = 128, 4, {"completion": 5, "chat": 20}, 16
"""Most choices, stop strings and alternatives, and the `max_tokens` that a completion has where it says nothing: OpenAI's."""


class Refusal(Exception):
    """A request that is answered with an error: HTTP status, text, the field, OpenAI's `code`, and after how many seconds
    to try again (0: never)."""

    def __init__(self, status: int, text: str, field: str | None = None, code: str | None = None, again: int = 0) -> None:
        super().__init__(text)
        self.status, self.field, self.code, self.again = status, field, code, again

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kinds = {429: "rate_limit_error", 404: "not_found_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a body asks for.  `most`: tokens of a choice, None for as many as there can be; `alternatives`: None where no
    log-probabilities are asked for; `usage`: whether a stream ends with the counts."""

    chat: bool
    model: str | None
    prompts: tuple[Prompt, ...]
    messages: tuple[dict[str, Any], ...]
    most: int | None
    choices: int
    stop: tuple[str, ...]
    sampling: Sampling
    alternatives: int | None
    stream: bool
    usage: bool


# --- what is asked --------------------------------------------------------------------------------------------------


def read_request(text: bytes, *, chat: bool) -> Asked:
    """A body as JSON.  Raises Refusal."""
    try:
        body = json.loads(text)
        if b"\\u" in text:  # half a surrogate pair is JSON, and no text
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is no JSON") from None
    if not isinstance(body, dict):
        raise Refusal(400, "the body is no JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise Refusal(400, f"{name}: this server does not do that", name, "unsupported_parameter")
        if name not in (CHAT if chat else COMPLETION) | PASSED_OVER | set(NEUTRAL):
            raise Refusal(400, f"{name}: no such field", name, "unknown_parameter")
    options = of_kind(body, "stream_options", dict, {}, "an object")
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    return Asked(
        chat=chat,
        model=of_kind(body, "model", str, None, "a string"),
        prompts=() if chat else prompts_of(body.get("prompt")),
        messages=messages_of(body.get("messages")) if chat else (),
        most=whole(body, limit, 1, 1 << 31, None if chat else COMPLETION_TOKENS),
        choices=whole(body, "n", 1, CHOICES, 1),
        stop=stop_of(body.get("stop", [])),
        sampling=Sampling(
            temperature=number(body, "temperature", 0.0, 2.0, 1.0), top_p=number(body, "top_p", 0.0, 1.0, 1.0),
            top_k=max(0, whole(body, "top_k", -1, 1 << 31, 0)), penalty=number(body, "repetition_penalty", 0.01, 100.0, 1.0),
            seed=whole(body, "seed", -(1 << 63), (1 << 63) - 1, int.from_bytes(os.urandom(4), "little")) & 0xFFFFFFFF,
        ),
        alternatives=alternatives_of(body, chat=chat),
        stream=of_kind(body, "stream", bool, False, "true or false"),
        usage=of_kind(options, "include_usage", bool, False, "true or false"),
    )  # fmt: skip


def of_kind(body: dict[str, Any], name: str, kind: type, default: Any, words: str) -> Any:
    """A field of one type.  Raises Refusal."""
    value = body.get(name, default)
    if name in body and not isinstance(value, kind):
        raise Refusal(400, f"{name}: expected {words}", name)
    return value


def whole(body: dict[str, Any], name: str, low: int, high: int, default: Any) -> Any:
    """A whole number within bounds.  Raises Refusal."""
    value = body.get(name, default)
    if name in body and (type(value) is not int or not low <= value <= high):
        raise Refusal(400, f"{name}: expected a whole number from {low} to {high}", name)
    return value


def number(body: dict[str, Any], name: str, low: float, high: float, default: float) -> float:
    """A number within bounds.  Raises Refusal."""
    value = body.get(name, default)
    if type(value) not in (int, float) or not low <= value <= high:
        raise Refusal(400, f"{name}: expected a number from {low:g} to {high:g}", name)
    return float(value)


def prompts_of(given: Any) -> tuple[Prompt, ...]:
    """A text, tokens, or a list of either.  Raises Refusal."""
    several = given if isinstance(given, list) and given and not all(type(each) is int for each in given) else [given]
    found: list[Prompt] = []
    for each in several:
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, list) and each and all(type(token) is int for token in each):
            found.append(tuple(each))
        else:
            raise Refusal(400, "prompt: expected a string, a list of tokens, or a list of these", "prompt")
    return tuple(found)


def messages_of(given: Any) -> tuple[dict[str, Any], ...]:
    """Messages with a role and a text; of a content in parts, which have to be text, the whole.  Raises Refusal."""
    if not isinstance(given, list) or not given:
        raise Refusal(400, "messages: expected a list of messages", "messages")
    found = []
    for index, each in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(each, dict) or not isinstance(each.get("role"), str):
            raise Refusal(400, f"{where}: expected an object with a role and a content", "messages")
        content = each.get("content")
        if isinstance(content, list) and all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
        ):
            content = "".join([part["text"] for part in content])
        if not isinstance(content, str):
            raise Refusal(400, f"{where}.content: expected a string, or parts of type text", "messages")
        found.append({**each, "content": content})
    return tuple(found)


def stop_of(given: Any) -> tuple[str, ...]:
    """One string or several.  Raises Refusal."""
    several = [given] if isinstance(given, str) else given
    if not isinstance(several, list) or len(several) > STOP_STRINGS or not all(isinstance(each, str) and each for each in several):
        raise Refusal(400, f"stop: expected a string, or up to {STOP_STRINGS}", "stop")
    return tuple(several)


def alternatives_of(body: dict[str, Any], *, chat: bool) -> int | None:
    """How many likeliest tokens are to be told; None where not even the log-probability of the one that was made is.  Raises
    Refusal."""
    if not chat:
        told: int | None = whole(body, "logprobs", 0, ALTERNATIVES["completion"], None)
        return told
    wanted = of_kind(body, "logprobs", bool, False, "true or false")
    count: int = whole(body, "top_logprobs", 0, ALTERNATIVES["chat"], 0)
    if count and not wanted:
        raise Refusal(400, "top_logprobs: only with logprobs true", "top_logprobs")
    return count if wanted else None


# --- what is answered ---------------------------------------------------------------------------------------------------


def usage_of(prompt: int, made: int) -> dict[str, int]:
    """Counts of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def choice(asked: Asked, index: int, piece: Piece, language: Language, *, first: bool = False) -> dict[str, Any]:
    """A choice: of a whole answer, or where a stream is asked for of one piece; `first`: that of a stream, which says who
    speaks."""
    logprobs = None if asked.alternatives is None else (chat_logprobs if asked.chat else logprobs_of)(piece, language)
    told: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": piece.reason}
    if not asked.chat:
        return told | {"text": piece.text}
    if asked.stream:
        return told | {"delta": {"role": "assistant", "content": piece.text} if first else {"content": piece.text}}
    return told | {"message": {"role": "assistant", "content": piece.text, "refusal": None}}


def finite(logprob: float) -> float:
    """JSON has no infinities; OpenAI writes -9999 for a token that cannot come."""
    return logprob if logprob > -9999.0 else -9999.0


def logprobs_of(piece: Piece, language: Language) -> dict[str, Any]:
    """Of a completion, as four lists; the offsets are those of the tokens' own texts from where the piece begins."""
    tokens = [language.one(token.id) for token in piece.tokens]
    offsets, at = [], piece.offset
    for text in tokens:
        offsets.append(at)
        at += len(text)
    best = [{language.one(other): finite(logprob) for other, logprob in token.alternatives} for token in piece.tokens]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(token.logprob) for token in piece.tokens],
        "top_logprobs": best,
        "text_offset": offsets,
    }


def chat_logprobs(piece: Piece, language: Language) -> dict[str, Any]:
    """Of a chat completion, a token behind the other."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        return {"token": language.one(token), "logprob": finite(logprob), "bytes": language.bytes_of(token)}

    content = [
        told(token.id, token.logprob) | {"top_logprobs": [told(*other) for other in token.alternatives]} for token in piece.tokens
    ]
    return {"content": content, "refusal": None}


def joined(pieces: Sequence[Piece]) -> Piece:
    """The whole answer."""
    tokens = tuple([token for piece in pieces for token in piece.tokens])
    return Piece("".join([piece.text for piece in pieces]), tokens, 0, pieces[-1].reason)
