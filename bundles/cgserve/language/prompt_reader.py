"""Reads request bodies in a thread, because JSON, templates and tokenizers take time.  The number of waiting bodies is limited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..scheduling.requests import Request
from .completions import Asked, Refusal, read_request
from .served_model import ServedModel

TEXTS, WAITING = 1, 1024
"""Bodies that are read in parallel (most of the work holds the GIL), and the maximum that are read or wait."""

Choose = Callable[[str | None], ServedModel]
"""Returns the model that serves a name, or the only one for None.  Raises Refusal."""


class PromptReader:
    """Reads bodies for all language models of a server."""

    def __init__(self, choose: Choose, unread: Callable[[str, int], None]) -> None:
        """`unread` gets path and status of a body that names no model or cannot be served."""
        self.choose, self.unread = choose, unread
        self._threads, self._reading = ThreadPoolExecutor(TEXTS, "text"), 0

    async def read(self, body: bytes, *, chat: bool) -> tuple[ServedModel, Asked, list[Request]]:
        """Returns the model that a body names, the parsed body, and its requests.  Raises Refusal."""

        def work() -> tuple[ServedModel, Asked, list[Request]]:
            asked = read_request(body, chat=chat)
            served = self.choose(asked.model)
            return served, asked, served.requests_of(asked)

        while True:
            served, asked, requests = await self.run(work)
            same = self.choose(asked.model) is served and served.adapter_of(asked.model) == requests[0].adapter
            if same:  # no await until the requests are open, so versions and adapters cannot change in between
                return served, asked, requests

    async def run(self, work: Callable[[], Any]) -> Any:
        """Calls `work` in the thread and returns its result.  Raises Refusal if too many wait."""
        if self._reading >= WAITING:
            raise Refusal(503, f"{WAITING} prompts wait to be read", again=1)
        self._reading += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._reading -= 1
