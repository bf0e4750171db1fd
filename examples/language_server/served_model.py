"""A language model as clients know it: its name, its tokenizer, the copies that answer, and their requests for what a body asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .completions import Asked, Refusal
from .engine import Model
from .engines import Engines
from .metrics import Metrics
from .scheduler import Request
from .text import Language


class ServedModel:
    """Copies of a model under one name.  `context` is the longest text in tokens, `metrics` what is counted of all of them."""

    def __init__(self, models: Sequence[Model], language: Language, name: str, limit: int) -> None:
        """`models`: a copy for each device; `name`: what clients call them; `limit`: requests that may be open on each, running and
        waiting."""
        self.language, self.name = language, name
        self.metrics = Metrics()
        self.engine = Engines(models, limit, self.metrics.watch)
        self.context = min(self.engine.limits.context, language.positions or self.engine.limits.context)
        self._created = int(time.time())

    def about(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "cgbundle", "max_model_len": self.context}

    def check_name(self, name: str | None) -> None:
        """Raises Refusal for another model's; None is this one."""
        if name is not None and name != self.name:
            raise Refusal(404, f"no model {name!r}; there is {self.name}", "model", "model_not_found")

    async def requests_of(self, asked: Asked) -> list[Request]:
        """A request for each choice of each prompt.  Raises Refusal."""
        self.check_name(asked.model)
        count = asked.choices * max(1, len(asked.prompts))
        if count > self.engine.limit:
            raise Refusal(400, f"n: {count} answers asked for; {self.engine.limit} requests may be open", "n")
        prompts = [await self._chat(asked)] if asked.chat else [await self._prompt(each) for each in asked.prompts]
        found = []
        for prompt in prompts:
            most = self.context - len(prompt) if asked.most is None else asked.most
            if len(prompt) + max(1, most) > self.context:
                text = f"the model takes {self.context} tokens; the prompt has {len(prompt)}, and max_tokens is {max(1, most)}"
                raise Refusal(400, text, "messages" if asked.chat else "prompt", "context_length_exceeded")
            for index in range(asked.choices):
                sampling = replace(asked.sampling, seed=asked.sampling.seed + index, alternatives=asked.alternatives or 0)
                found.append(Request(prompt=prompt, most=most, stop=self.language.stop, sampling=sampling))
        return found

    async def _prompt(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            tokens = await asyncio.to_thread(self.language.tokens, prompt, special=True)
        elif not all(0 <= token < self.language.size for token in prompt):
            raise Refusal(400, f"prompt: expected tokens from 0 to {self.language.size - 1}", "prompt")
        else:
            tokens = prompt
        if not tokens:
            raise Refusal(400, "prompt: no token", "prompt")
        return tokens

    async def _chat(self, asked: Asked) -> tuple[int, ...]:
        if self.language.chat is None:
            raise Refusal(400, "the tokenizer has no chat template; use /v1/completions", "messages")
        try:
            text = self.language.chat.render(asked.messages)
        except ValueError as error:
            raise Refusal(400, f"messages: {error}", "messages") from None
        tokens = await asyncio.to_thread(self.language.tokens, text, special=False)
        if not tokens:
            raise Refusal(400, "messages: no token", "messages")
        return tokens
