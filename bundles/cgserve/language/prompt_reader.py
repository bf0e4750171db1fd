"""Bodies that become requests, in a thread: JSON, templates and tokenizers take their time, and a few may wait for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..scheduling.requests import Request
from .completions import Asked, Refusal, read_request
from .served_model import ServedModel

TEXTS, WAITING = 1, 1024
"""Bodies that are read at once, since most of it keeps the interpreter; and that may be read or wait for that."""

Choose = Callable[[str | None], ServedModel]
"""The model that serves under a name, or the only one for None.  Raises Refusal."""


class PromptReader:
    """Reads bodies for all language models of a server."""

    def __init__(self, choose: Choose, unread: Callable[[str, int], None]) -> None:
        """`unread` is told of the path and status of a body that named no model, or asked for nothing that can be done."""
        self.choose, self.unread = choose, unread
        self._threads, self._reading = ThreadPoolExecutor(TEXTS, "text"), 0

    async def read(self, body: bytes, *, chat: bool) -> tuple[ServedModel, Asked, list[Request]]:
        """What a body asks for, the model that it names, and its requests.  Raises Refusal."""

        def work() -> tuple[ServedModel, Asked, list[Request]]:
            asked = read_request(body, chat=chat)
            served = self.choose(asked.model)
            return served, asked, served.requests_of(asked)

        while True:
            served, asked, requests = await self.run(work)
            same = self.choose(asked.model) is served and served.adapter_of(asked.model) == requests[0].adapter
            if same:  # a switch of versions or adapters comes before this, or after the requests are open
                return served, asked, requests

    async def run(self, work: Callable[[], Any]) -> Any:
        """What `work` gives, called in the thread.  Raises Refusal where too many wait for it."""
        if self._reading >= WAITING:
            raise Refusal(503, f"{WAITING} prompts wait to be read", again=1)
        self._reading += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._reading -= 1
