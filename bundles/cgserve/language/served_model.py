"""A language model for clients: its name, its tokenizer, its copies, and the requests for a body."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..restrictions.grammars import GrammarMatcher, Grammars, MissingEngine
from ..restrictions.rules import TokenRules
from ..restrictions.tools import TAGS, CallReader, Toolbox, answer_grammar, template_messages
from ..scheduling.requests import NO_ADAPTER, STOPS, Adapter, Request, Sampling
from .adapters import AdapterError, read_adapter
from .answer import Answer
from .completions import ParsedBody, Refusal, messages_of, of_kind
from .engine import Model
from .engines import Engines
from .metrics import LanguageMetrics
from .tokenizer import Language

USUAL, SLACK = 4, 64
"""Typical characters per token, and how many additional tokens the beginning of a text may have when tokenized alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedAdapter:
    """An adapter with a name: the folder that it was read from, when it was loaded (Unix time), and its place in the bank."""

    folder: Path
    created: int
    adapter: Adapter


class ServedModel:
    """Copies of a model under one name.  `context`: the longest text in tokens; `metrics`: those of all copies; `adapters`: the
    served adapters, by the name that requests use as their model."""

    def __init__(
        self, models: Sequence[Model], language: Language, name: str, limit: int, metrics: LanguageMetrics, seconds: float
    ) -> None:
        """`models`: a copy for each device; `name`: for clients; `limit`: maximum open requests of each copy, running and waiting;
        `seconds`: maximum wait for a request's first token."""
        self.language, self.name, self.metrics, self.seconds = language, name, metrics, seconds
        self.engine = Engines(models, limit, self.metrics.watch)
        self.context = min(self.engine.limits.context, language.positions or self.engine.limits.context)
        self.characters = self.context * language.longest_token
        self._created = int(time.time())
        self._grammars: Grammars | None = None
        self.adapters: Mapping[str, ServedAdapter] = {}  # replaced at every change, because a thread may read it
        self._numbers, self._loading = itertools.count(1), asyncio.Lock()

    def about(self, name: str) -> dict[str, Any]:
        """Returns the model, or the model with an adapter, in OpenAI's format."""
        adapter = self.adapters.get(name)
        created = self._created if adapter is None else adapter.created
        parent = {} if adapter is None else {"parent": self.name}
        card = {"id": name, "object": "model", "created": created, "owned_by": "cgbundle", "max_model_len": self.context}
        return card | parent

    def adapter_of(self, name: str | None) -> Adapter:
        """Returns the adapter for requests with this name."""
        served = self.adapters.get(name or "")
        return NO_ADAPTER if served is None else served.adapter

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Reads an adapter and serves the model with it under `name`.  Raises AdapterError, CgbundleError, ModelFailed."""
        async with self._loading:
            bank = self.engine.bank
            if bank is None:
                raise AdapterError("the bundle has no bank of adapters: build it with cgcompile build FOLDER --adapters N")
            if not name or name == self.name or name in self.adapters:
                raise AdapterError(f"adapter {name!r}: the name is taken" if name else "an adapter needs a name")
            used = {loaded.adapter.place for loaded in self.adapters.values()} | self.engine.adapters
            place = next((place for place in range(1, bank.count + 1) if place not in used), 0)
            if not place:
                raise AdapterError(f"adapter {name!r}: the bundle holds {bank.count} at a time (cgcompile build --adapters N)")
            weights = await asyncio.to_thread(read_adapter, folder, bank)
            try:
                await self.engine.load_adapter(place, weights)
            except AdapterError as error:
                raise AdapterError(f"{folder}: {error}") from None
            adapter = Adapter(place, next(self._numbers))
            served = ServedAdapter(folder=folder, created=int(time.time()), adapter=adapter)
            self.adapters = {**self.adapters, name: served}

    def unload_adapter(self, name: str) -> bool:
        """Removes a name, and returns whether it existed.  Open requests continue; afterwards the adapter's place is free."""
        exists = name in self.adapters
        self.adapters = {other: served for other, served in self.adapters.items() if other != name}
        return exists

    def requests_of(self, parsed: ParsedBody) -> list[Request]:
        """Returns a request for each choice of each prompt.  Raises Refusal."""
        adapter = self.adapter_of(parsed.model)
        matcher = self._matcher(parsed)
        stop = (() if parsed.ignore_end and matcher is None else self.language.stop) + parsed.stop_tokens
        if len(stop) > STOPS:
            raise Refusal(
                400,
                f"stop_token_ids: {len(stop)} tokens end an answer, with the model's own; at most {STOPS} may",
                "stop_token_ids",
            )
        count = parsed.choices * max(1, len(parsed.prompts))
        if count > self.engine.limit:
            raise Refusal(400, f"n: {count} answers asked for; {self.engine.limit} requests may be open", "n")
        prompts = (
            [self._chat(parsed.messages, parsed.template, parsed.toolbox)]
            if parsed.chat
            else [self._prompt(asked_prompt, parsed.special) for asked_prompt in parsed.prompts]
        )
        requests = []
        for prompt in prompts:
            most = self.context - len(prompt) if parsed.most is None else parsed.most
            if len(prompt) + max(1, most) > self.context:
                text = f"the model takes {self.context} tokens; the prompt has {len(prompt)}, and max_tokens is {max(1, most)}"
                raise Refusal(400, text, "messages" if parsed.chat else "prompt", "context_length_exceeded")
            for index in range(parsed.choices):
                options: dict[str, Any] = {**self.language.sampling, **parsed.sampling, "alternatives": parsed.alternatives or 0}
                sampling = Sampling(**(options | {"seed": options["seed"] + index}))
                requests.append(self._request(parsed, prompt, most, stop, sampling, matcher, adapter))
        return requests

    def _request(
        self, parsed: ParsedBody, prompt: tuple[int, ...], most: int, stop: tuple[int, ...], sampling: Sampling,
        matcher: GrammarMatcher | None, adapter: Adapter,
    ) -> Request:  # fmt: skip
        """Returns a request, with rules if necessary.  If `parsed.scored`, the rules force all tokens of the prompt but the
        first."""
        forced = prompt[1:] if parsed.scored else ()
        if not forced and not most:
            raise Refusal(400, "max_tokens: 0 requires a prompt of at least two tokens", "max_tokens")
        read_tokens, rules = prompt[: len(prompt) - len(forced)], None
        if matcher is not None or parsed.wishes or forced:
            matcher_copy = None if matcher is None else matcher.copy()
            rules = TokenRules(self.engine.limits.vocabulary, len(read_tokens), parsed.wishes, stop, matcher_copy, forced)
        count = most + len(forced)
        return Request(
            prompt=read_tokens, most=count, stop=stop, sampling=sampling, rules=rules, forced=len(forced), adapter=adapter
        )  # fmt: skip

    def answer(self, parsed: ParsedBody, request: Request) -> Answer:
        """Returns the object that converts a request's tokens to text."""
        tools, text = parsed.toolbox.callable, self.language.text
        reader = CallReader(tools, self.language.tool_form) if tools else None
        offset = len(text(request.prompt)) if parsed.echo else 0
        return Answer(text, request.prompt, parsed.stop, reader, request.forced, offset)

    def _matcher(self, parsed: ParsedBody) -> GrammarMatcher | None:
        """Returns the matcher of the grammar for the answers, or None.  Raises Refusal."""
        unknown = [token for token in parsed.wishes.biases if token >= self.language.size]
        if unknown:
            raise Refusal(400, f"logit_bias: expected tokens from 0 to {self.language.size - 1}", "logit_bias")
        field = "tools" if parsed.toolbox.forced else "response_format"
        needed = parsed.schema is not None or parsed.toolbox.forced
        if not self.engine.limits.vocabulary and (needed or parsed.wishes or parsed.scored):
            name = field if needed else "logit_bias, min_tokens, echo with logprobs, penalties by count"
            raise Refusal(400, f"{name}: the bundle has no entry `choose`; build it again", field if needed else None)
        if not needed:
            return None
        try:
            if self._grammars is None:
                self._grammars = Grammars(self.language.source, self.engine.limits.vocabulary, self.language.stop)
            special = self._grammars.special(TAGS)
            return self._grammars.matcher(answer_grammar(parsed.schema, parsed.toolbox, self.language.tool_form, special))
        except MissingEngine as error:
            raise Refusal(400, f"{field}: this server {error}", field, "unsupported_parameter") from None
        except ValueError as error:
            raise Refusal(400, f"{field}: {error}", field) from None

    def tokens_of(self, body: dict[str, Any]) -> tuple[int, ...]:
        """Returns the tokens of `prompt` or `messages` in a body.  Raises Refusal."""
        special = of_kind(body, "add_special_tokens", bool, True, "true or false")
        if "messages" in body:
            template = of_kind(body, "chat_template_kwargs", dict, {}, "an object")
            return self._chat(messages_of(body["messages"]), template, Toolbox())
        return self._prompt(of_kind(body, "prompt", str, None, "a string") or "", special)

    def _check_length(self, text: str, field: str) -> None:
        """Raises Refusal if the text has more characters than the longest tokens could cover."""
        if len(text) > self.characters:
            cause = f"the model takes {self.context} tokens, of {self.characters} characters at most; the prompt has {len(text)}"
            raise Refusal(400, cause, field, "context_length_exceeded")

    def _tokens(self, text: str, field: str, *, special: bool) -> tuple[int, ...]:
        """Returns the tokens of a text.  Tokenizes the beginning of a long text first, because megabytes take seconds and much
        memory.  Raises Refusal if the beginning is already too long."""
        self._check_length(text, field)
        limit = USUAL * self.context
        while limit < len(text):
            if len(self.language.tokens(text[:limit], special=special)) > self.context + SLACK:
                cause = f"the model takes {self.context} tokens; the first {limit} of the prompt's {len(text)} characters have more"
                raise Refusal(400, cause, field, "context_length_exceeded")
            limit *= 2
        return self.language.tokens(text, special=special)

    def _prompt(self, prompt: str | tuple[int, ...], special: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            tokens = self._tokens(prompt, "prompt", special=special)
        elif not all(0 <= token < self.language.size for token in prompt):
            raise Refusal(400, f"prompt: expected tokens from 0 to {self.language.size - 1}", "prompt")
        else:
            tokens = prompt
        if not tokens:
            raise Refusal(400, "prompt: no token", "prompt")
        return tokens

    def _chat(self, messages: Sequence[dict[str, Any]], template: Mapping[str, Any], toolbox: Toolbox) -> tuple[int, ...]:
        if self.language.chat is None:
            raise Refusal(400, "the tokenizer has no chat template; use /v1/completions", "messages")
        form, tools = self.language.tool_form, toolbox.callable
        messages = template_messages(messages, tools, form)
        self._check_length("".join([message["content"] for message in messages]), "messages")
        if tools and form.lists_tools:
            template = {**template, "tools": [tool.definition for tool in tools]}
        try:
            text = self.language.chat.render(messages, template)
        except ValueError as error:
            raise Refusal(400, f"messages: {error}", "messages") from None
        tokens = self._tokens(text, "messages", special=False)
        if not tokens:
            raise Refusal(400, "messages: no token", "messages")
        return tokens
