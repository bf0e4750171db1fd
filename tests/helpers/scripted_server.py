"""An OpenAI-compatible server in a thread, over a fast fake model with known output."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cgbundle.errors import CgbundleError
from tests.helpers.loaded_language_model import Loaded
from tests.helpers.models.tokenizers import END, byte_tokenizer

SCRIPT = "Höre 😀, END of it. "
PAGES = 40


class Scripted:
    """A model that repeats SCRIPT, from an index that depends on the seed and the position; from position `top_k` on it generates
    END. If a lane has rules, it ends the JSON as soon as possible, or else generates an allowed token. Calls wait for `gate`, and
    fail if a lane starts at position `fails` or later. They check that the pages hold what earlier calls wrote.
    """

    def __init__(self) -> None:
        from cgserve.scheduling.requests import Limits, Made, Token

        sizes = {"page": 4, "pages": PAGES + 1, "slots": 9, "blocks": 30, "chunk": 16, "lanes": 6, "loop_lanes": 4, "turns": 4}
        self.limits = Limits(**sizes, readers=(2, 4), several=True, shared=True, vocabulary=258)
        self.bank = None
        self.made, self.token, self.ids = Made, Token, byte_tokenizer().encode(SCRIPT).ids
        self.gate, self.fails = threading.Event(), 1000
        self.gate.set()
        self.cache: dict[tuple[int, int], int] = {}
        self.prepared = self.called = 0

    def prepare(self, step: Any) -> Callable[[Any], Any]:
        self.prepared += 1
        return lambda before: self._run(step, before)

    def _run(self, step: Any, before: Any) -> Any:
        self.called += 1
        self.gate.wait()
        if any(lane.start >= self.fails for lane in step.lanes):
            raise CgbundleError("program-closed", "the device\nis gone")
        rows = [self._lane(lane, before) for lane in step.lanes]
        return self.made([row[-1].id for row in rows], lambda: rows)

    def _lane(self, lane: Any, before: Any) -> list[Any]:
        generated, sampling = [], lane.sampling
        for place, token in enumerate(lane.ids if lane.behind < 0 else [before.tokens[lane.behind]], lane.start):
            self._write(lane, place, token)
        for place in range(lane.start + len(lane.ids), lane.start + len(lane.ids) + lane.most):
            ends = sampling.top_k and place >= sampling.top_k
            token = END if ends else self.ids[(sampling.seed + place) % len(self.ids)]
            if lane.rules is not None:
                assert lane.most == 1
                last = lane.ids[-1] if lane.behind < 0 else before.tokens[lane.behind]
                token = self._ruled(lane.rules, place, last, token, fresh=len(lane.ids) > 1 or lane.behind < 0)
            others = tuple([(token - number, -0.5 - number) for number in range(sampling.alternatives)])
            generated.append(self.token(token, -0.5, others))
            if ends or len(generated) == lane.most:
                break
            self._write(lane, place, token)
        return generated

    def _ruled(self, rules: Any, place: int, last: int, token: int, *, fresh: bool) -> int:
        changed = rules.follow(place, last, fresh=fresh)
        assert all(rules.bias(choice) == bias for choice, bias in changed.items())
        allowed = [choice for choice in (*range(256), END) if rules.words[choice // 32] >> choice % 32 & 1]
        ends = [choice for choice in (END, *byte_tokenizer().encode('}]"').ids) if choice in allowed and len(allowed) < 257]
        return ends[0] if ends else max(allowed, key=lambda choice: (rules.bias(choice), choice == token, -choice))

    def _write(self, lane: Any, place: int, token: int) -> None:
        def where(place: int) -> tuple[int, int]:
            return lane.pages[place // self.limits.page], place % self.limits.page

        self.cache[where(place)] = place
        assert all(self.cache[where(earlier)] == earlier for earlier in range(place)), "a page with two owners"


def said(start: int, count: int) -> str:
    """Returns `count` bytes that Scripted generates with seed 0 from position `start` on."""
    data = SCRIPT.encode()
    return bytes([data[(start + offset) % len(data)] for offset in range(count)]).decode(errors="replace")


class Running:
    """A server in a thread, over a model."""

    def __init__(self, model: Any, folder: Path, limit: int = 32, others: Sequence[Any] = (), seconds: float = 60.0) -> None:
        from cgserve.application import Application
        from cgserve.language.served_model import ServedModel
        from cgserve.language.tokenizer import Language
        from cgserve.settings import Settings
        from cgserve.transport.running import make_server

        self.model = model
        application = Application(dict, Settings(), lambda event: None)
        metrics = application.counters.language("script")
        self.served = ServedModel([model, *others], Language(folder), "script", limit, metrics, seconds)
        application.repository = Loaded(self.served)  # type: ignore[assignment]
        self.uvicorn = make_server(application.app)
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.thread = threading.Thread(target=self.uvicorn.run, args=([listening],))
        self.thread.start()
        self.until(lambda: self.uvicorn.started)

    def ask(self, path: str, body: Any = None, method: str = "") -> tuple[int, Any, dict[str, str]]:
        """Returns (status, body, headers). The body is parsed JSON, a list of events for a stream, or text."""
        connection = self.send(path, body, method)
        answer = connection.getresponse()
        text, headers = answer.read().decode(), dict(answer.getheaders())
        connection.close()
        kind = headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
            assert all("\n" not in event for event in events)
            return answer.status, [event if event == "[DONE]" else json.loads(event) for event in events], headers
        return answer.status, json.loads(text) if kind == "application/json" else text, headers

    def send(self, path: str, body: Any = None, method: str = "") -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, data)
        return connection

    def complete(self, prompt: Any = "abc", **more: Any) -> Any:
        status, answer, _ = self.ask("/v1/completions", {"prompt": prompt, "seed": 0, **more})
        assert status == 200, answer
        return answer

    def chat(self, text: str = "Hi", **more: Any) -> Any:
        body = {"messages": [{"role": "user", "content": text}], "seed": 0, **more}
        status, answer, _ = self.ask("/v1/chat/completions", body)
        assert status == 200, answer
        return answer

    @staticmethod
    def until(true: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not true():
            assert time.monotonic() < end
            time.sleep(0.005)

    def until_free(self) -> None:
        """Waits until no request holds a page."""
        self.until(lambda: self.served.engine.state.pages_free == PAGES and not self.served.engine.open_requests)
        assert (self.served.engine.state.running, self.served.engine.state.waiting) == (0, 0)

    def stop(self) -> None:
        self.model.gate.set()
        self.uvicorn.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[Running]:
    server = Running(Scripted(), folder, **options)
    try:
        yield server
    finally:
        server.stop()
