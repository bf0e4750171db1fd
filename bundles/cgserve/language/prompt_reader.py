"""Reads request bodies in a thread, because JSON, templates and tokenizers take time.  The number of waiting bodies is limited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..scheduling.requests import Request
from .completions import ParsedBody, Refusal, read_request
from .served_model import ServedModel

THREADS, MAX_PENDING = 1, 1024
"""Threads that read bodies (one, because most of the work holds the GIL), and the maximum number of bodies in progress."""

Choose = Callable[[str | None], ServedModel]
"""Returns the model that serves a name, or the only one for None.  Raises Refusal."""


class PromptReader:
    """Reads bodies for all language models of a server."""

    def __init__(self, choose: Choose, count_refused: Callable[[str, int], None]) -> None:
        """`count_refused` gets the path and the status of a body that names no model or cannot be served."""
        self.choose, self.count_refused = choose, count_refused
        self._threads, self._pending = ThreadPoolExecutor(THREADS, "text"), 0

    async def read(self, body: bytes, *, chat: bool) -> tuple[ServedModel, ParsedBody, list[Request]]:
        """Returns the model that a body names, the parsed body, and its requests.  Raises Refusal."""

        def work() -> tuple[ServedModel, ParsedBody, list[Request]]:
            parsed = read_request(body, chat=chat)
            served = self.choose(parsed.model)
            return served, parsed, served.requests_of(parsed)

        while True:
            served, parsed, requests = await self.run(work)
            same = self.choose(parsed.model) is served and served.adapter_of(parsed.model) == requests[0].adapter
            if same:  # no version or adapter has changed since `work`; the caller opens the requests before its next await
                return served, parsed, requests

    async def run(self, work: Callable[[], Any]) -> Any:
        """Calls `work` in the thread and returns its result.  Raises Refusal if too many wait."""
        if self._pending >= MAX_PENDING:
            raise Refusal(503, f"{MAX_PENDING} request bodies wait to be read", retry_after=1)
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._pending -= 1
