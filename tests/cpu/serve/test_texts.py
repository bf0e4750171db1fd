"""Embeddings, rerankers and classifiers over HTTP: models with known answers, a bundle, and the `openai` client."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import math
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.places import ROOT

for package in ("starlette", "uvicorn", "prometheus_client", "tokenizers"):
    pytest.importorskip(package, reason="pip install '.[serve]'")

import tokenizers  # noqa: E402

from cgserve.application import Application  # noqa: E402
from cgserve.batching.request_queue import Busy, Late  # noqa: E402
from cgserve.language.tokenizer import Language  # noqa: E402
from cgserve.settings import Settings  # noqa: E402
from cgserve.tensors.entry import Ports  # noqa: E402
from cgserve.tensors.inference_protocol import Port, TensorData  # noqa: E402
from cgserve.text.text_model import AT_ONCE, TextModel, takes_texts  # noqa: E402
from cgserve.transport.running import listen, make_server  # noqa: E402

WORDS = ("the", "cat", "sleeps", "on", "a", "mat", "while", "rain", "falls")


def ports(width: int, inputs: int = 2) -> Ports:
    names = ("input_ids", "attention_mask", "token_type_ids")[:inputs]
    output = Port("y", "FP32", (-1, width), ("batch", width))
    sides = tuple([Port(name, "INT64", (-1, -1), ("batch", "seq")) for name in names]), (output,)
    return Ports(*sides, (1, 4), (("batch", (1, 4)), ("seq", (4, 8))))


class Summing:
    """An entry whose output is, for each row, (sum of token ids, sum of the mask, sum of token types, 0, ...)."""

    def __init__(self, shown: Ports) -> None:
        self.ports, self.calls, self.waiting = shown, list[tuple[int, ...]](), 0
        self.full = False

    async def answer(self, tensors: Sequence[TensorData], seconds: float) -> list[TensorData]:
        if self.full:
            raise Busy("3 requests wait already", 2)
        rows, length = tensors[0].shape
        self.calls.append((rows, length))
        columns = [struct.unpack(f"<{rows * length}q", tensor.data) for tensor in tensors]
        width = self.ports.outputs[0].shape[1]
        floats = []
        for row in range(rows):
            sums = [float(sum(column[row * length : (row + 1) * length])) for column in columns]
            floats += (sums + [0.0] * width)[:width]
        return [TensorData((rows, width), struct.pack(f"<{len(floats)}f", *floats))]


def write_words(folder: Path, **config: Any) -> Path:
    """Writes a tokenizer of WORDS, whose token ids start at 1."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Runs three models in one server."""
    folder = tmp_path_factory.mktemp("texts")
    labels = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "bad", "1": "good", "2": "none"}}
    kinds = {"embed": (ports(2), {}), "rerank": (ports(1, 3), {}), "classify": (ports(3), labels)}
    models, versions = {}, {}
    for name, (shown, config) in kinds.items():
        entry = Summing(shown)
        models[name] = TextModel(name, Language(write_words(folder / name, **config)), shown, entry.answer, 5.0)
        assert models[name].task == name
        version = {"model": name, "number": 1, "language": None, "text": models[name], "failure": None, "names": (name,)}
        versions[name] = SimpleNamespace(**version, entries={name: entry}, memory={}, seconds={})
    application = Application(dict, Settings(), lambda event: None)
    current = {name: SimpleNamespace(current=version, refused={}) for name, version in versions.items()}
    current["loading"] = SimpleNamespace(current=None, refused={})

    class Loaded:
        models, looked = current, True

        async def __aenter__(self) -> None:
            pass

        async def __aexit__(self, *_: object) -> None:
            pass

        def serving(self) -> list[Any]:
            return list(versions.values())

    application.repository = Loaded()  # type: ignore[assignment]
    server, listening = make_server(application.app), listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    entries = {name: version.entries[name] for name, version in versions.items()}
    yield SimpleNamespace(port=listening.getsockname()[1], entries=entries)
    server.should_exit = True
    thread.join(60)


def ask(port: int, path: str, body: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_embeddings(served: SimpleNamespace) -> None:
    served.entries["embed"].calls.clear()
    texts = ["the cat", "a", "the cat sleeps on a mat", "rain falls", "mat", "cat", "sleeps"]
    status, response = ask(served.port, "/v1/embeddings", {"model": "embed", "input": texts})
    assert status == 200 and response["model"] == "embed" and response["usage"] == {"prompt_tokens": 14, "total_tokens": 14}
    tokens = [[WORDS.index(word) + 1 for word in text.split()] for text in texts]
    assert [entry["embedding"] for entry in response["data"]] == [[sum(row), len(row)] for row in tokens]
    assert [entry["index"] for entry in response["data"]] == list(range(7))
    assert sorted(served.entries["embed"].calls) == [(1, 8), (2, 4), (4, 4)], "by the recorded length, up to the largest batch"
    status, response = ask(served.port, "/v1/embeddings", {"input": "the cat", "encoding_format": "base64"})
    assert struct.unpack("<2f", base64.b64decode(response["data"][0]["embedding"])) == (3.0, 2.0)
    for tokens_alone in ([1, 2], [[1, 2]]):
        assert ask(served.port, "/v1/embeddings", {"input": tokens_alone})[1]["data"][0]["embedding"] == [3.0, 2.0]


def test_a_reranker(served: SimpleNamespace) -> None:
    body = {"model": "rerank", "query": "the", "documents": ["cat", {"text": "rain falls"}, "a"], "return_documents": True}
    for path in ("/v1/rerank", "/rerank"):
        status, response = ask(served.port, path, body | {"raw_scores": True})
        assert status == 200 and [entry["index"] for entry in response["results"]] == [1, 2, 0]
        assert [entry["relevance_score"] for entry in response["results"]] == [18.0, 6.0, 3.0]
        assert response["results"][0]["document"] == {"text": "rain falls"}
    status, response = ask(served.port, "/v1/rerank", body | {"top_n": 1})
    assert response["results"] == [{"index": 1, "relevance_score": 1 / (1 + math.exp(-18.0)), "document": {"text": "rain falls"}}]


def test_the_second_text_of_a_pair_is_marked(tmp_path: Path) -> None:
    model = TextModel("m", Language(write_words(tmp_path)), ports(3, 3), Summing(ports(3, 3)).answer, 5.0)
    tensors = model._tensors(model.encoded([("the cat", "a mat")], field="documents", truncate=False), 8)
    assert struct.unpack("<8q", tensors[2].data) == (0, 0, 1, 1, 0, 0, 0, 0)
    assert struct.unpack("<8q", tensors[1].data) == (1, 1, 1, 1, 0, 0, 0, 0)


class Gated(Summing):
    """Calls wait until `open` is set."""

    def __init__(self) -> None:
        super().__init__(ports(2))
        self.open, self.most = asyncio.Event(), 0

    async def answer(self, tensors: Sequence[TensorData], seconds: float) -> list[TensorData]:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        try:
            await asyncio.wait_for(self.open.wait(), seconds)
            await asyncio.sleep(0)
            return await super().answer(tensors, seconds)
        finally:
            self.waiting -= 1


def test_few_calls_of_a_request_wait_at_once(tmp_path: Path) -> None:
    """2048 texts need 513 calls, more than the queue holds. This request is answered; another one gets the error to retry later."""
    entry = Gated()
    model = TextModel("m", Language(write_words(tmp_path)), ports(2), entry.answer, 60.0, 100, lambda calls: calls)

    async def run() -> None:
        texts = model.encoded(["the cat"] * 2047 + ["rain falls on a mat"], field="input", truncate=False)
        large = asyncio.create_task(model.answer(texts, tuple))
        await asyncio.sleep(0.01)
        assert entry.most == AT_ONCE and not large.done()
        with pytest.raises(Busy, match="requests wait for 513 calls already") as caught:
            model.check_room(1)
        assert caught.value.seconds == 513
        with pytest.raises(Busy):
            await model.answer(texts[:1], tuple)
        draining = asyncio.create_task(model.drain())
        await asyncio.sleep(0.01)
        assert not draining.done()
        entry.open.set()
        assert await large == [(3.0, 2.0)] * 2047 + [(8.0 + 9.0 + 4.0 + 5.0 + 6.0, 5.0)]
        await draining
        assert (entry.most, len(entry.calls)) == (AT_ONCE, 513)
        assert await model.answer(texts[:1], tuple) == [(3.0, 2.0)]

    asyncio.run(run())


def test_a_request_ends_at_its_deadline(tmp_path: Path) -> None:
    entry = Gated()
    model = TextModel("m", Language(write_words(tmp_path)), ports(2), entry.answer, 0.05)
    texts = model.encoded(["the cat"] * 400, field="input", truncate=False)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(model.answer(texts, tuple))
    assert isinstance(caught.value.exceptions[0], TimeoutError) and entry.calls == []


class Slow(Summing):
    """Every call takes 0.15 s. The error of a late call contains the time limit of this call."""

    async def answer(self, tensors: Sequence[TensorData], seconds: float) -> list[TensorData]:
        try:
            async with asyncio.timeout(seconds):
                await asyncio.sleep(0.15)
        except TimeoutError:
            raise Late(f"no answer within {seconds:g} s") from None
        return await super().answer(tensors, seconds)


def test_a_late_request_is_told_its_own_deadline(tmp_path: Path) -> None:
    """Later calls of a request have less time left. The error names the time limit of the request."""
    model = TextModel("m", Language(write_words(tmp_path)), ports(2), Slow(ports(2)).answer, 0.25)
    texts = model.encoded(["the cat"] * 4 * 4 * AT_ONCE, field="input", truncate=False)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(model.answer(texts, tuple))
    assert {str(error) for error in caught.value.exceptions} == {"no answer within 0.25 s"}


def test_a_classifier(served: SimpleNamespace) -> None:
    status, response = ask(served.port, "/classify", {"model": "classify", "input": ["cat"]})
    (row,) = response["data"]
    assert status == 200 and (row["label"], row["num_classes"]) == ("bad", 3) and response["labels"] == ["bad", "good", "none"]
    weights = [math.exp(number) for number in (2.0, 1.0, 0.0)]
    assert row["probs"] == pytest.approx([weight / sum(weights) for weight in weights])


@pytest.mark.parametrize(
    ("path", "body", "status", "field", "text"),
    [
        ("embeddings", {}, 400, "input", "input: expected a string, a list of tokens, or a list of these"),
        ("embeddings", {"input": ["a", 5]}, 400, "input", "input: expected a string, a list of tokens, or a list of these"),
        ("embeddings", {"input": ["a"] * 2049}, 400, "input", "input: 2049 texts; at most 2048 are allowed"),
        ("embeddings", {"input": [99]}, 400, "input", "input: expected tokens from 0 to 9"),
        ("embeddings", {"input": ""}, 400, "input", "input: a text without a token"),
        ("embeddings", {"input": "a " * 9}, 400, "input", "input: 9 tokens, and the model takes 8 tokens; `truncate` cuts"),
        ("embeddings", {"input": "a" * 999}, 400, "input", "input: 999 characters, and the model takes 8 tokens; `truncate` cuts"),
        ("embeddings", {"input": "a", "dimensions": 5}, 400, "dimensions", "dimensions: no such field"),
        ("embeddings", {"input": "a", "encoding_format": "x"}, 400, "encoding_format", "encoding_format: expected float or base64"),
        ("embeddings", {"input": "a", "model": "rerank"}, 400, "model", "model: 'rerank' answers at /v1/rerank"),
        ("embeddings", {"input": "a", "model": "other"}, 404, "model", "no model 'other'; there is embed"),
        ("embeddings", {"input": "a", "model": "loading"}, 503, "model", "no version of 'loading' serves"),
        ("rerank", {"documents": ["a"]}, 400, "query", "query: expected a string"),
        (
            "rerank",
            {"query": "a", "documents": []},
            400,
            "documents",
            "documents: expected 1 to 2048 strings, or objects with a text",
        ),
        ("chat/completions", {"messages": [], "model": "embed"}, 400, "messages", "messages: expected a list of messages"),
    ],
)
def test_what_is_refused(served: SimpleNamespace, path: str, body: Any, status: int, field: str, text: str) -> None:
    code, response = ask(served.port, f"/v1/{path}", body)
    assert (code, response["error"]["message"], response["error"]["param"]) == (status, text, field)


def test_a_long_text_is_cut_where_that_is_asked_for(served: SimpleNamespace) -> None:
    status, response = ask(served.port, "/v1/embeddings", {"input": "the " * 8 + "cat", "truncate": True})
    assert status == 200 and response["data"][0]["embedding"] == [9.0, 8.0], "the last token stays"


def test_a_full_queue_is_429(served: SimpleNamespace) -> None:
    served.entries["embed"].full = True
    try:
        status, response = ask(served.port, "/v1/embeddings", {"input": ["a", "the cat sleeps on a"]})
        assert status == 429 and response["error"]["message"] == "3 requests wait already"
    finally:
        served.entries["embed"].full = False


def test_models_are_listed(served: SimpleNamespace) -> None:
    assert [model["id"] for model in ask(served.port, "/v1/models", None)[1]["data"]] == ["embed", "rerank", "classify"]


def test_openai_embeddings(served: SimpleNamespace) -> None:
    openai = pytest.importorskip("openai", reason="pip install '.[dev]'")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)
    response = client.embeddings.create(model="embed", input=["the cat", "a"])
    assert [entry.embedding for entry in response.data] == [[3.0, 2.0], [5.0, 1.0]] and response.usage.total_tokens == 3


def test_which_bundles_take_texts() -> None:
    assert takes_texts(ports(5)) and takes_texts(ports(1, 3))
    assert not takes_texts(ports(5, 1))
    floats = Ports((Port("x", "FP32", (-1, 6), ("batch", 6)),) * 2, ports(5).outputs, (1, 4))
    assert not takes_texts(floats)


# --- a bundle ---------------------------------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 5)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        kept = attention_mask.unsqueeze(-1).to(torch.float32)
        return (self.words(input_ids) * kept).sum(1) / kept.sum(1).clamp(min=1e-9)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Embed().eval()


def inputs(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(1, 16, (batch, seq)), torch.ones(batch, seq, dtype=torch.int64)
"""


@contextmanager
def serving(*arguments: object) -> Iterator[int]:
    """Runs `cgcompile serve` and yields its port."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "cgcompile_cli", "serve", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("listening at "), line + process.stderr.read()
        said = process.stderr.readline()
        assert said.startswith("serving embed"), said
        yield int(line.rpartition(":")[2])
    finally:
        process.kill()
        process.wait()


def test_a_bundle_with_its_tokenizer_beside_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import cgcompile

    (tmp_path / "embed.py").write_text(MODEL)
    bundle = tmp_path / "embed.cgb"
    cgcompile.build(str(tmp_path / "embed.py"), sizes=["batch=1,4", "seq=4,8"], out=bundle, target="cpu")
    write_words(tmp_path / "embed")
    names: dict[str, Any] = {}
    exec(MODEL, names)
    network = names["model"]()
    texts = ["the cat sleeps", "a mat", "rain falls on the cat while a cat sleeps", "falls"]
    with serving(bundle) as port:
        status, response = ask(port, "/v1/embeddings", {"input": texts, "truncate": True})
        assert status == 200 and ask(port, "/health", None)[1]["torch"] is False
        for text, row in zip(texts, response["data"], strict=True):
            ids = [WORDS.index(word) + 1 for word in text.split()]
            ids = [*ids[:7], ids[-1]] if len(ids) > 8 else ids
            with torch.no_grad():
                expected = network(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64))[0].tolist()
            assert row["embedding"] == pytest.approx(expected, abs=1e-6)
        assert ask(port, "/v2/models/embed", None)[0] == 200, "by the other protocol, too"
