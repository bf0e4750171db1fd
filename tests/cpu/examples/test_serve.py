"""examples/serve.py: its dynamic batching, and a server over real HTTP that never imports torch."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.places import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def batching() -> ModuleType:
    return importlib.import_module("cgserve.batching.token_batches")


# --- batching -----------------------------------------------------------------------------------------------------


class Model:
    """Sums the tokens of each row and records its calls. Raises an error for token 13."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.called: list[tuple[list[list[int]], int]] = []
        self.seconds = seconds

    def __call__(self, rows: Sequence[Sequence[int]], length: int) -> list[int]:
        self.called.append(([list(row) for row in rows], length))
        time.sleep(self.seconds)
        if any(13 in row for row in rows):
            raise ValueError("bad luck")
        return [sum(row) for row in rows]


def asked(batching: ModuleType, model: Any, session: Callable[[Any], Awaitable[Any]], **options: Any) -> Any:
    """Returns the result of `session(batcher)`, with lengths 2 and 4 and batches of at most 3."""

    async def run() -> Any:
        async with batching.Batcher(model, (2, 4), 3, **options) as batcher:
            return await asyncio.wait_for(session(batcher), 60)

    return asyncio.run(run())


def test_requests_that_fill_a_batch_do_not_wait(batching: ModuleType) -> None:
    model = Model()
    answers = asked(batching, model, lambda b: asyncio.gather(*[b.answer([n]) for n in range(6)]), wait=3600)
    assert answers == [0, 1, 2, 3, 4, 5]
    assert model.called == [([[0], [1], [2]], 2), ([[3], [4], [5]], 2)]


def test_requests_go_with_others_of_their_length(batching: ModuleType) -> None:
    model = Model()
    rows = [[1], [1, 2, 3], [4, 5], [1, 2, 3, 4], []]
    answers = asked(batching, model, lambda b: asyncio.gather(*map(b.answer, rows)), wait=0.05)
    assert answers == [1, 6, 9, 10, 0]
    assert sorted(model.called) == [([[1], [4, 5], []], 2), ([[1, 2, 3], [1, 2, 3, 4]], 4)]


def test_what_comes_during_a_call_goes_with_the_next(batching: ModuleType) -> None:
    model = Model(seconds=0.3)

    async def session(batcher: Any) -> list[int]:
        first = asyncio.create_task(batcher.answer([1]))
        await asyncio.sleep(0.1)
        return [*await asyncio.gather(*[batcher.answer([n]) for n in (2, 3)]), await first]

    assert asked(batching, model, session, wait=0.0) == [2, 3, 1]
    assert [rows for rows, _ in model.called] == [[[1]], [[2], [3]]]


def test_several_calls_run_at_once(batching: ModuleType) -> None:
    """Each of the two calls waits for the other."""
    both = threading.Barrier(2, timeout=60)

    def model(rows: Sequence[Sequence[int]], length: int) -> list[int]:
        both.wait()
        return [length] * len(rows)

    assert asked(batching, model, lambda b: asyncio.gather(b.answer([1]), b.answer([1, 2, 3])), calls=2) == [2, 4]


def test_what_is_longer_than_the_longest_is_refused(batching: ModuleType) -> None:
    with pytest.raises(batching.TooLong, match="5 tokens, where at most 4 were recorded"):
        asked(batching, Model(), lambda b: b.answer([1] * 5))


def test_a_failed_row_fails_only_its_own_request(batching: ModuleType) -> None:
    async def session(batcher: Any) -> list[Any]:
        rows = ([13], [1], [2], [1, 2, 3])
        return await asyncio.gather(*[batcher.answer(row) for row in rows], return_exceptions=True) + [await batcher.answer([5])]

    model = Model()
    answers = asked(batching, model, session)
    assert [str(answer) for answer in answers] == ["bad luck", "1", "2", "6", "5"]
    assert [rows for rows, length in model.called if length == 2] == [[[13], [1], [2]], [[13]], [[1]], [[2]], [[5]]]


def test_a_cancelled_request_is_not_computed(batching: ModuleType) -> None:
    model = Model()

    async def session(batcher: Any) -> int:
        gone = asyncio.create_task(batcher.answer([7]))
        await asyncio.sleep(0)
        gone.cancel()
        return await batcher.answer([1])

    assert asked(batching, model, session, wait=0.05) == 1
    assert model.called == [([[1]], 2)]


def test_cancelled_requests_make_room_in_a_full_queue(batching: ModuleType) -> None:
    model = Model()

    async def session(batcher: Any) -> list[Any]:
        gone = [asyncio.create_task(batcher.answer([1, 2, n])) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(sys.modules["cgserve.batching.request_queue"].Busy):
            await batcher.answer([1])
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        return await asyncio.gather(batcher.answer([1]), batcher.answer([2]))

    assert asked(batching, model, session, wait=0.05, limit=2) == [1, 2]
    assert model.called == [([[1], [2]], 2)]


def test_every_request_gets_its_own_answer(batching: ModuleType) -> None:
    """Each of 300 requests at random times gets the answer for its row. No call is too large or mixes lengths."""
    draw, model = random.Random(0), Model(seconds=0.001)
    rows = [[draw.randrange(20, 10**6) for _ in range(draw.randrange(5))] for _ in range(300)]

    async def session(batcher: Any) -> list[int]:
        async def later(row: list[int]) -> int:
            await asyncio.sleep(draw.random() / 4)
            return await batcher.answer(row)

        return await asyncio.gather(*map(later, rows))

    assert asked(batching, model, session) == [sum(row) for row in rows]
    assert all(len(some) <= 3 and {2 if len(row) <= 2 else 4 for row in some} == {length} for some, length in model.called)
    assert len(model.called) < 300


# --- HTTP ---------------------------------------------------------------------------------------------------------

WORDS = ("the", "cat", "sleeps", "on", "a", "mat", "while", "rain", "falls")

MODEL = """
import torch
from torch import nn


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(16, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        kept = attention_mask.unsqueeze(-1).to(torch.float32)
        mean = (self.words(input_ids) * kept).sum(1) / kept.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(self.out(torch.tanh(mean)), dim=-1)


def model() -> nn.Module:
    return Embed().eval()


def inputs(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.randint(1, seq + 1, (batch, 1))
    mask = (torch.arange(seq) < lengths).to(torch.int64)
    return torch.randint(1, 16, (batch, seq)) * mask, mask
"""
"""MiniLM's signature: the normalized mean over the tokens that the mask keeps."""


Expected = Callable[[str], list[float]]
"""Returns eager PyTorch's answer for a text."""


class Served:
    """A running server, its port and the expected answers."""

    def __init__(self, process: subprocess.Popen[str], port: int, expected: Expected) -> None:
        self.process, self.port, self.expected = process, port, expected

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> tuple[int, Any]:
        """Returns (status, body as JSON) of one request on a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {"Content-Type": kind})
        answer = connection.getresponse()
        payload = json.loads(answer.read())
        connection.close()
        return answer.status, payload

    def embed(self, text: object) -> tuple[int, Any]:
        """Requests the embedding of one text."""
        return self.ask("POST", "/embed", json.dumps({"text": text}).encode())


def start(*arguments: object) -> subprocess.Popen[str]:
    """Starts `python examples/serve.py ARGUMENTS`."""
    path = os.pathsep.join([str(ROOT / "bundles"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(EXAMPLES / "serve.py"), *map(str, arguments)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Expected]:
    """Returns the bundle, its tokenizer.json, and the function for expected answers."""
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package, reason="pip install '.[serve]'")
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'cgcompile[examples]'")
    torch = pytest.importorskip("torch")
    import cgcompile

    folder = tmp_path_factory.mktemp("serve")
    (folder / "embed.py").write_text(MODEL)
    sizes = ["batch=1,4", "seq=4,8"]
    bundle = cgcompile.build(str(folder / "embed.py"), sizes=sizes, out=folder / "embed.cgb", target="cpu").path
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    names: dict[str, Any] = {}
    exec(MODEL, names)
    network = names["model"]()

    def expected(text: str) -> list[float]:
        ids = torch.tensor([words.encode(text).ids])
        with torch.no_grad():
            return network(ids, torch.ones_like(ids))[0].tolist()

    return bundle, folder / "tokenizer.json", expected


@contextmanager
def serving(artifacts: tuple[Path, Path, Expected]) -> Iterator[Served]:
    """Runs a new server at a free port."""
    bundle, words, expected = artifacts
    process = start(bundle, "--port", 0, "--calls", 2, "--tokenizer", words)
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        assert said.startswith("serving embed at http://127.0.0.1:"), said + process.stderr.read()
        yield Served(process, int(said.rsplit(":", 1)[1]), expected)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def server(artifacts: tuple[Path, Path, Expected]) -> Iterator[Served]:
    """Runs one server for all tests that leave it running."""
    with serving(artifacts) as running_server:
        yield running_server


def test_64_clients_get_their_own_answers_from_a_process_without_torch(server: Served) -> None:
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 9))) for _ in range(64 * 5)]
    before = server.ask("GET", "/health")[1]
    with ThreadPoolExecutor(64) as clients:
        answers = list(clients.map(server.embed, texts))
    expected = {text: server.expected(text) for text in texts}
    for text, (status, payload) in zip(texts, answers, strict=True):
        assert status == 200 and payload["tokens"] == len(text.split())
        assert payload["embedding"] == pytest.approx(expected[text], abs=1e-6)
    status, about = server.ask("GET", "/health")
    assert status == 200 and about["torch"] is False
    rows, calls = (about[what] - before[what] for what in ("rows", "calls"))
    assert rows == len(texts) and len(texts) / 4 <= calls < len(texts), "requests that came together were one call"
    assert about["int_keys"] == [[1, 4], [1, 8], [4, 4], [4, 8]]
    spent = {name: seconds - before["spans"].get(name, 0.0) for name, seconds in about["spans"].items()}
    assert spent.keys() == {"tokens", "queue", "call", "tensors", "replay", "rows"} and min(spent.values()) > 0
    assert spent["tensors"] + spent["replay"] + spent["rows"] <= spent["call"]


@pytest.mark.parametrize(
    ("body", "status", "line"),
    [
        (b'{"text": ', 400, "body: Invalid JSON: EOF while parsing a value at line 1 column 9"),
        (b"\xff\xfe", 400, "body: Invalid JSON"),
        (b"[1]", 400, "body: Input should be an object"),
        (b"", 400, "body: Invalid JSON"),
        (b'{"txt": "the cat"}', 400, "text: Field required"),
        (b'{"text": 5}', 400, "text: Input should be a valid string"),
        (json.dumps({"text": "cat " * 9}).encode(), 413, "text: 9 tokens, where at most 8 were recorded"),
        (json.dumps({"text": "x" * 20_001}).encode(), 400, "text: String should have at most 20000 characters"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(server: Served, body: bytes, status: int, line: str) -> None:
    got, payload = server.ask("POST", "/embed", body)
    assert (got, list(payload)) == (status, ["detail"])
    assert payload["detail"].startswith(line) and "\n" not in payload["detail"]
    assert server.embed("the cat")[0] == 200, "the server goes on"


def test_other_paths_and_kinds(server: Served) -> None:
    assert server.ask("GET", "/nothing") == (404, {"detail": "Not Found"})
    assert server.ask("GET", "/embed") == (405, {"detail": "Method Not Allowed"})
    assert server.ask("POST", "/embed", b'{"text": "cat"}', "text/plain")[0] == 400


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_server_stops_without_a_word(artifacts: tuple[Path, Path, Expected], how: signal.Signals) -> None:
    with serving(artifacts) as server:
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        kept.request("GET", "/health")
        assert kept.getresponse().read(), "a connection that is kept open does not hold it up"
        server.process.send_signal(how)
        assert server.process.wait(60) == 0
        assert server.process.stderr is not None and server.process.stderr.read() == ""


def test_what_cannot_be_served_is_one_line(artifacts: tuple[Path, Path, Expected], bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expected = {
            ("nothing.cgb", "--tokenizer", artifacts[1]): "serve: nothing.cgb: no such bundle\n",
            (
                bundle,
                "--tokenizer",
                artifacts[1],
            ): "serve: expected a bundle of (input_ids, attention_mask) -> one output, int64 (batch, seq)\n",
            (artifacts[0], "--tokenizer", artifacts[1], "--port", port): f"serve: 127.0.0.1:{port}: Address already in use\n",
        }
        for arguments, line in expected.items():
            process = start(*arguments)
            assert (process.communicate(timeout=300)[1], process.returncode) == (line, 1)
