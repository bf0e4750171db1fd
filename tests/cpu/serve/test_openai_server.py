"""OpenAI's protocol over real HTTP: a fast model with known output, the `openai` client, and a bundle without torch."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cgbundle
from tests.helpers.models.tokenizers import byte_tokenizer, write_tokenizer
from tests.helpers.places import GOLDEN, ROOT
from tests.helpers.scripted_server import PAGES, SCRIPT, Running, Scripted, running, said

for package in ("starlette", "uvicorn", "prometheus_client", "tokenizers", "jinja2"):
    pytest.importorskip(package, reason="pip install '.[serve]'")

CHAT = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, chat_template=CHAT)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder) as running_server:
        yield running_server


# --- completions ------------------------------------------------------------------------------------------------------


def test_a_completion(server: Running) -> None:
    completion = server.complete("abc", max_tokens=12)
    assert completion["object"] == "text_completion" and completion["model"] == "script" and completion["id"].startswith("cmpl-")
    assert completion["choices"] == [{"index": 0, "text": said(3, 12), "logprobs": None, "finish_reason": "length"}]
    assert completion["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
    assert server.complete("abc")["usage"]["completion_tokens"] == 16, "OpenAI's default"


def test_a_stop_token_ends_it(server: Running) -> None:
    completion = server.complete("abc", top_k=9)
    assert completion["choices"][0]["text"] == said(3, 6) and completion["choices"][0]["finish_reason"] == "stop"
    assert completion["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize(("stop", "text"), [("END", "e 😀, "), (["x", "😀"], "e "), (["it. H", "nothing"], "e 😀, END of ")])
def test_stop_strings(server: Running, stop: Any, text: str) -> None:
    for stream in (False, True):
        reply = server.complete("abcd", max_tokens=60, stop=stop, stream=stream)
        choices = [chunk["choices"][0] for chunk in reply[:-1]] if stream else reply["choices"]
        assert "".join([choice["text"] for choice in choices]) == text and choices[-1]["finish_reason"] == "stop"
    server.until_free()


def test_several_prompts_and_choices(server: Running) -> None:
    completion = server.complete(["a", "bcd"], max_tokens=5, n=2)
    data = SCRIPT.encode() * 2
    expected = [data[place + seed : place + seed + 5].decode(errors="replace") for place in (1, 3) for seed in (0, 1)]
    assert [(choice["index"], choice["text"]) for choice in completion["choices"]] == list(enumerate(expected))
    assert completion["usage"] == {"prompt_tokens": 4, "completion_tokens": 20, "total_tokens": 24}


def test_a_prompt_of_tokens(server: Running) -> None:
    ids = byte_tokenizer().encode("abc").ids
    for prompt in (ids, [ids]):
        assert server.complete(prompt, max_tokens=4)["choices"][0]["text"] == said(3, 4)


def test_a_stream(server: Running) -> None:
    events = server.complete("abc", max_tokens=30, stream=True, stream_options={"include_usage": True})
    *pieces, usage, done = events
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["total_tokens"] == 33
    assert len({piece["id"] for piece in (*pieces, usage)}) == 1 and all(piece["usage"] is None for piece in pieces)
    texts = [piece["choices"][0]["text"] for piece in pieces]
    assert "".join(texts) == said(3, 30) and not any("�" in text for text in texts[:-1]) and len(texts) > 3
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert "usage" not in server.complete("abc", stream=True)[0]


def test_log_probabilities(server: Running) -> None:
    log_probs = server.complete("abcd", max_tokens=4, logprobs=2)["choices"][0]["logprobs"]
    assert log_probs["tokens"] == ["e", " ", "ð", "Ł"] and log_probs["token_logprobs"] == [-0.5] * 4
    assert log_probs["top_logprobs"][0] == {"e": -0.5, "d": -1.5} and log_probs["text_offset"] == [0, 1, 2, 3]
    assert server.complete("abc", max_tokens=2, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] == [{}, {}]
    streamed = server.complete("abcd", max_tokens=4, logprobs=2, stream=True)[:-1]
    assert [token for chunk in streamed for token in chunk["choices"][0]["logprobs"]["tokens"]] == log_probs["tokens"]


def test_a_seed_gives_the_same_again_and_none_another(server: Running) -> None:
    texts = {server.complete("abc", seed=seed)["choices"][0]["text"] for seed in (5, 5, -1, 1 << 40)}
    assert len(texts) == 3
    assert len({server.complete("abc", seed=None, max_tokens=20)["choices"][0]["text"] for _ in range(12)}) > 1


# --- chat -------------------------------------------------------------------------------------------------------------


def test_a_chat(server: Running) -> None:
    completion = server.chat("Hi", max_tokens=9)
    prompt = len("user: Hi\nassistant:")
    assert completion["object"] == "chat.completion" and completion["id"].startswith("chatcmpl-")
    (choice,) = completion["choices"]
    assert choice["message"] == {"role": "assistant", "content": said(prompt, 9), "refusal": None}
    assert completion["usage"] == {"prompt_tokens": prompt, "completion_tokens": 9, "total_tokens": prompt + 9}
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert server.chat(parts, max_completion_tokens=9)["usage"] == completion["usage"]  # type: ignore[arg-type]


def test_a_chat_goes_on_until_the_context_ends(server: Running) -> None:
    assert server.chat("Hi")["usage"]["total_tokens"] == server.served.context == 120


def test_a_chat_as_a_stream(server: Running) -> None:
    *pieces, done = server.chat("Hi", max_tokens=9, n=2, stream=True)
    assert done == "[DONE]" and {piece["object"] for piece in pieces} == {"chat.completion.chunk"}
    for index in (0, 1):
        deltas = [piece["choices"][0]["delta"] for piece in pieces if piece["choices"][0]["index"] == index]
        assert deltas[0]["role"] == "assistant" and not any("role" in delta for delta in deltas[1:])
        assert "".join([delta["content"] for delta in deltas]) == said(19 + index, 9)


def test_log_probabilities_of_a_chat(server: Running) -> None:
    token_logprobs = server.chat("Hi", max_tokens=2, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    text = said(19, 2)
    assert [entry["token"] for entry in token_logprobs] == list(text) and token_logprobs[0]["bytes"] == [ord(text[0])]
    assert [entry["logprob"] for entry in token_logprobs[0]["top_logprobs"]] == [-0.5, -1.5]


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with running(tmp_path) as server:
        status, reply, _ = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
        assert status == 400 and reply["error"]["message"] == "the tokenizer has no chat template; use /v1/completions"


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "field", "text"),
    [
        ("completions", b"{", 400, None, "the body is not JSON"),
        ("completions", b"[" * 100_000, 400, None, "the body is not JSON"),
        ("completions", rb'{"prompt": "\ud800"}', 400, None, "the body is not JSON"),
        ("completions", {"prompt": ["a", "b"], "n": 17}, 400, "n", "n: 34 answers asked for; 32 requests may be open"),
        ("completions", {"prompt": "a", "top_p": float("nan")}, 400, "top_p", "top_p: expected a number from 0 to 1"),
        ("completions", [], 400, None, "the body is not a JSON object"),
        ("completions", {}, 400, "prompt", "prompt: expected a string, a list of tokens, or a list of these"),
        ("completions", {"prompt": []}, 400, "prompt", "prompt: expected a string, a list of tokens, or a list of these"),
        ("completions", {"prompt": ""}, 400, "prompt", "prompt: no token"),
        ("completions", {"prompt": [999]}, 400, "prompt", "prompt: expected tokens from 0 to 257"),
        ("completions", {"prompt": "a", "model": "b"}, 404, "model", "no model 'b'; there is script"),
        ("completions", {"prompt": "a", "best": 1}, 400, "best", "best: no such field"),
        (
            "completions", {"prompt": "a", "echo": True, "max_tokens": 0}, 400, "max_tokens",
            "max_tokens: 0 requires a prompt of at least two tokens",
        ),
        (
            "completions", {"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias",
            "logit_bias: expected tokens with a number from -100 to 100",
        ),
        ("completions", {"prompt": "a", "logit_bias": {"258": 1}}, 400, "logit_bias", "logit_bias: expected tokens from 0 to 257"),
        ("completions", {"prompt": "a", "min_p": 2}, 400, "min_p", "min_p: expected a number from 0 to 1"),
        (
            "completions", {"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty",
            "presence_penalty: expected a number from -2 to 2",
        ),
        (
            "completions", {"prompt": "a", "stop_token_ids": ["a"]}, 400, "stop_token_ids",
            "stop_token_ids: expected a list of tokens",
        ),
        (
            "completions", {"prompt": "a", "stop_token_ids": list(range(8))}, 400, "stop_token_ids",
            "stop_token_ids: 9 tokens end an answer, with the model's own; at most 8 may",
        ),
        (
            "chat/completions", {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "xml"}}, 400,
            "response_format", "response_format.type: expected text, json_object or json_schema",
        ),
        ("completions", {"prompt": "a", "n": True}, 400, "n", "n: expected a whole number from 1 to 128"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature", "temperature: expected a number from 0 to 2"),
        ("completions", {"prompt": "a", "stop": ["a"] * 5}, 400, "stop", "stop: expected a string, or up to 4"),
        ("completions", {"prompt": "a", "logprobs": 6}, 400, "logprobs", "logprobs: expected a whole number from 0 to 5"),
        ("completions", {"prompt": "a", "stream": 1}, 400, "stream", "stream: expected true or false"),
        (
            "completions", {"prompt": "a" * 100, "max_tokens": 21}, 400, "prompt",
            "the model takes 120 tokens; the prompt has 100, and max_tokens is 21",
        ),
        ("chat/completions", {"messages": []}, 400, "messages", "messages: expected a list of messages"),
        (
            "chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages",
            "messages[0].content: expected a string, or parts of type text",
        ),
        (
            "chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "top_logprobs",
            "top_logprobs: only with logprobs true",
        ),
        (
            "chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "tools",
            "tools[0]: expected an object with the type function and a function",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(server: Running, path: str, body: Any, status: int, field: str | None, text: str) -> None:
    code, reply, _ = server.ask(f"/v1/{path}", body)
    assert (code, reply["error"]["message"], reply["error"]["param"]) == (status, text, field)


def test_fields_that_ask_for_nothing_are_passed_over(server: Running) -> None:
    neutral = {"echo": False, "best_of": 1, "frequency_penalty": 0.0, "logit_bias": None, "user": "me", "suffix": None}
    assert server.complete("abc", max_tokens=3, **neutral)["choices"][0]["text"] == said(3, 3)


def test_neutral_values_pass(server: Running) -> None:
    neutral = {
        "presence_penalty": 0, "logit_bias": {"7": 0}, "n": 1, "tools": [], "tool_choice": "auto",
        "response_format": {"type": "text"},
        "min_p": 0.0, "min_tokens": 0, "functions": [], "store": False, "service_tier": "auto", "length_penalty": 1.0,
    }  # fmt: skip
    assert server.chat("Hi", max_tokens=9, **neutral)["choices"][0]["message"]["content"] == said(19, 9)
    calls = {"role": "assistant", "content": None}
    body = {"messages": [{"role": "user", "content": "Hi"}, calls], "max_tokens": 2}
    assert server.ask("/v1/chat/completions", body)[0] == 200


def test_echo(server: Running) -> None:
    for prompt in ("abc", byte_tokenizer().encode("abc").ids):
        assert server.complete(prompt, max_tokens=4, echo=True)["choices"][0]["text"] == "abc" + said(3, 4)
    *pieces, _ = server.complete("abc", max_tokens=4, echo=True, stream=True)
    assert "".join([piece["choices"][0]["text"] for piece in pieces]) == "abc" + said(3, 4)


def test_log_probabilities_of_a_prompt(server: Running) -> None:
    """The first token has no log-probability. Stop strings and stop tokens in the prompt have no effect."""
    prompt = byte_tokenizer().encode("abEc").ids
    asked = {"echo": True, "logprobs": 2, "stop": "E", "stop_token_ids": prompt[2:3]}
    completion = server.complete(prompt, max_tokens=3, **asked)
    (choice,) = completion["choices"]
    assert choice["text"] == "abEc" + said(4, 3) and completion["usage"]["prompt_tokens"] == 4
    assert completion["usage"]["completion_tokens"] == 3 and choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:4] == list("abEc") and logprobs["text_offset"] == list(range(7))
    assert logprobs["token_logprobs"] == [None] + [-0.5] * 6 and logprobs["top_logprobs"][:2] == [None, {"b": -0.5, "a": -1.5}]
    pieces = [chunk["choices"][0] for chunk in server.complete(prompt, max_tokens=3, stream=True, **asked)[:-1]]
    assert "".join([piece["text"] for piece in pieces]) == choice["text"]
    assert [logprob for piece in pieces for logprob in piece["logprobs"]["token_logprobs"]] == logprobs["token_logprobs"]
    assert [offset for piece in pieces for offset in piece["logprobs"]["text_offset"]] == logprobs["text_offset"]
    for more in ({"logprobs": 0}, {}):
        (choice,) = server.complete(prompt, max_tokens=0, echo=True, **more)["choices"]
        assert choice["text"] == "abEc" and choice["finish_reason"] == "length"
    server.until_free()


def test_what_ends_an_answer(server: Running) -> None:
    """`stop_token_ids` add to the model's own end tokens, which `ignore_eos` disables."""
    ended = server.complete("abc", max_tokens=12, stop_token_ids=byte_tokenizer().encode("D").ids)["choices"][0]
    assert ended["finish_reason"] == "stop" and ended["text"] == said(3, 12).partition("D")[0]
    assert server.complete("abc", max_tokens=12, top_k=9, ignore_eos=True)["usage"]["completion_tokens"] == 12


def test_arguments_of_the_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="{{ messages[0].content }}{% if thinking %} think{% endif %}")
    with running(tmp_path) as server:
        assert server.chat("Hi", max_tokens=2)["usage"]["prompt_tokens"] == 2
        assert server.chat("Hi", max_tokens=2, chat_template_kwargs={"thinking": True})["usage"]["prompt_tokens"] == 8


def test_the_models_own_sampling_is_the_default(tmp_path: Path) -> None:
    from cgserve.language.completions import read_request

    write_tokenizer(tmp_path)
    settings = {"eos_token_id": 257, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with running(tmp_path) as server:
        asked = read_request(b'{"prompt": "abc", "top_k": 0, "seed": 7}', chat=False)
        (request,) = server.served.requests_of(asked)
        chosen = request.sampling
        assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.penalty, chosen.seed) == (0.6, 0, 1.0, 1.1, 7)


def test_tokens_of_a_text_and_back(server: Running) -> None:
    status, reply, _ = server.ask("/tokenize", {"prompt": "abc"})
    ids = byte_tokenizer().encode("abc").ids
    assert (status, reply) == (200, {"count": 3, "max_model_len": 120, "tokens": ids})
    assert server.ask("/v1/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})[1]["count"] == 19
    assert server.ask("/detokenize", {"tokens": ids})[1] == {"prompt": "abc"}
    assert server.ask("/detokenize", {"tokens": [999]})[1]["error"]["message"] == "tokens: expected tokens from 0 to 257"


def test_no_token_within_the_deadline(folder: Path) -> None:
    with running(folder, seconds=0.2) as server:
        server.model.gate.clear()
        status, reply, headers = server.ask("/v1/completions", {"prompt": "abc"})
        assert status == 503 and reply["error"]["message"] == "no token within 0.2 s" and headers["retry-after"] == "1"
        server.model.gate.set()
        server.until_free()


def test_other_paths(server: Running) -> None:
    assert server.ask("/v1/models")[1]["data"][0]["id"] == "script"
    assert server.ask("/v1/models/script")[1]["max_model_len"] == 120 and server.ask("/v1/models/other")[0] == 404
    status, reply, _ = server.ask("/v1/nothing")
    assert status == 404 and reply["error"]["message"] == "no path /v1/nothing; GET / lists the models and their paths"
    status, reply, _ = server.ask("/v1/completions", None, "GET")
    assert status == 405 and reply["error"]["message"] == "/v1/completions: the method GET is not allowed; use POST"


def test_the_first_page_lists_the_paths_of_a_language_model(server: Running) -> None:
    status, reply, _ = server.ask("/", None, "GET")
    paths = [f"POST {path}" for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")]
    assert status == 200 and reply["models"] == {"script": paths}


# --- many requests, and disconnects ------------------------------------------------------------------------------------------


def test_too_many_are_told_to_come_back(folder: Path) -> None:
    with running(folder, limit=3) as server:
        server.model.gate.clear()
        waiting = server.send("/v1/completions", {"prompt": "abc", "n": 2, "max_tokens": 4, "seed": 0})
        server.until(lambda: server.served.engine.open_requests == 2)
        status, reply, headers = server.ask("/v1/completions", {"prompt": "abc", "n": 2})
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert reply["error"]["message"] == "2 requests are open and 2 asked for; the limit is 3"
        assert reply["error"]["type"] == "rate_limit_error"
        server.model.gate.set()
        assert json.loads(waiting.getresponse().read())["usage"]["completion_tokens"] == 8
        server.until_free()
        assert server.complete("abc", n=2)
        text = server.ask("/metrics")[1]
        assert 'cgbundle_llm_requests_total{code="429",model="script",path="/v1/completions"} 1.0' in text


def test_the_next_step_is_prepared_while_one_runs(folder: Path) -> None:
    """Also checks that a repeated prompt is not computed again."""
    with running(folder) as server:
        server.model.gate.clear()
        waiting = server.send("/v1/completions", {"prompt": "a" * 90, "max_tokens": 5, "seed": 0})
        server.until(lambda: server.model.prepared == 2)
        time.sleep(0.05)
        assert (server.model.prepared, server.model.called) == (2, 1)
        server.model.gate.set()
        assert json.loads(waiting.getresponse().read())["choices"][0]["text"] == said(90, 5)
        before = server.served.engine.state.shared
        assert server.complete("a" * 90, max_tokens=5)["choices"][0]["text"] == said(90, 5)
        assert server.served.engine.state.shared - before == 80, "five chunks of 16 tokens"
        server.until_free()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(server: Running, stream: bool) -> None:
    server.model.gate.clear()
    gone = server.send("/v1/completions", {"prompt": "abc", "max_tokens": 90, "n": 3, "stream": stream})
    server.until(lambda: server.served.engine.state.pages_used > 0)
    gone.close()
    server.until(lambda: not server.served.engine.open_requests)
    server.model.gate.set()
    server.until_free()
    assert 'cgbundle_llm_requests_total{code="499",model="script",path="/v1/completions"}' in server.ask("/metrics")[1]


def test_random_requests_leak_no_pages(server: Running) -> None:
    """Sends requests with random lengths, some as streams, some disconnected. The cache is too small for all at once."""
    order = random.Random(3)

    def one(number: int) -> None:
        generator = random.Random(number)
        prompt, count = generator.randrange(1, 60), generator.randrange(1, 40)
        body = {"prompt": "x" * prompt, "max_tokens": count, "seed": 0, "stream": generator.random() < 0.5, "n": 1}
        if generator.random() < 0.3:
            connection = server.send("/v1/completions", body)
            time.sleep(generator.random() * 0.02)
            connection.close()
            return
        status, reply, _ = server.ask("/v1/completions", body)
        assert status == 200, reply
        text = "".join([chunk["choices"][0]["text"] for chunk in reply[:-1]]) if body["stream"] else reply["choices"][0]["text"]
        data = SCRIPT.encode() * 10
        context = b"x" * min(prompt, 6)
        assert text == (context + data[prompt : prompt + count]).decode(errors="replace")[len(context) :]

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(one, order.sample(range(1000), 150)))
    server.until_free()


def test_copies_on_several_devices(folder: Path) -> None:
    """A request goes to the least loaded replica. A replica that fails every request at once does not get all requests."""
    with running(folder, others=[Scripted()], limit=2) as server:
        models = [engine._model for engine in server.served.engine._engines]
        for model in models:
            model.gate.clear()
        sent = [server.send("/v1/completions", {"prompt": "abc", "max_tokens": 8, "seed": 0}) for _ in range(4)]
        server.until(lambda: [engine.open_requests for engine in server.served.engine._engines] == [2, 2])
        assert server.ask("/v1/completions", {"prompt": "abc"})[0] == 429
        for model in models:
            model.gate.set()
        assert {json.loads(connection.getresponse().read())["choices"][0]["text"] for connection in sent} == {said(3, 8)}
        server.until(lambda: server.served.engine.state.pages_free == 2 * PAGES)
        models[0].fails = 0
        statuses = [server.ask("/v1/completions", {"prompt": "abc", "max_tokens": 8, "seed": 0})[0] for _ in range(6)]
        assert statuses == [500] + [200] * 5
        models[0].fails = 1000


# --- failures and shutdown --------------------------------------------------------------------------------------------------


def test_a_call_that_fails_is_the_callers_alone(server: Running, capfd: pytest.CaptureFixture[str]) -> None:
    server.model.fails = 0
    status, reply, _ = server.ask("/v1/completions", {"prompt": "abc"})
    server.model.fails = 1000
    assert status == 500 and reply["error"]["message"] == "the model failed; the server's log says why"
    assert "serve: script: the device is gone" in capfd.readouterr().err
    server.until_free()
    assert server.complete("abc")["choices"]


def test_a_stream_that_fails_says_so(server: Running) -> None:
    server.model.fails = 20
    status, events, _ = server.ask("/v1/completions", {"prompt": "abc", "max_tokens": 40, "stream": True, "seed": 0})
    server.model.fails = 1000
    assert status == 200 and events[0]["choices"][0]["text"] and events[-1]["error"]["type"] == "server_error"
    server.until_free()


def test_the_end_waits_for_answers(folder: Path) -> None:
    with running(folder) as server:
        server.model.gate.clear()
        open_one = server.send("/v1/completions", {"prompt": "abc", "max_tokens": 40, "seed": 0})
        server.until(lambda: server.served.engine.open_requests == 1)
        server.uvicorn.should_exit = True
        server.until(lambda: refuses(server.port))
        server.model.gate.set()
        assert json.loads(open_one.getresponse().read())["usage"]["completion_tokens"] == 40
        server.thread.join(60)
        assert not server.thread.is_alive() and not server.served.engine.alive


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return True
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_broke_is_told_by_health(folder: Path) -> None:
    with running(folder) as server:
        assert server.ask("/health")[0] == 200

        def broken(before: Any) -> Any:
            raise KeyboardInterrupt

        server.model.prepare = lambda step: broken
        assert server.ask("/v1/completions", {"prompt": "abc"})[0] == 503
        assert server.ask("/health")[0] == 503 and server.ask("/v1/completions", {"prompt": "abc"})[0] == 503


def test_metrics(server: Running) -> None:
    before = server.ask("/metrics")[1]
    server.complete("abc", max_tokens=5)

    def value(text: str, name: str) -> float:
        return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)), 0.0)

    after = server.ask("/metrics")[1]
    assert value(after, "cgbundle_llm_generated_tokens_total") - value(before, "cgbundle_llm_generated_tokens_total") == 5
    assert value(after, "cgbundle_llm_prompt_tokens_total") - value(before, "cgbundle_llm_prompt_tokens_total") == 3
    assert value(after, "cgbundle_llm_pages_free") == PAGES


# --- a bundle ---------------------------------------------------------------------------------------------------------


class Process:
    """A `cgcompile serve` process."""

    models: Path

    def __init__(self, *options: object) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "cgcompile_cli", "serve", *map(str, options), "--port", "0"]
        self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.line = self.process.stderr.readline()
        self.port = int(self.line.rpartition(":")[2]) if self.line.startswith("listening ") else 0

    def send(self, path: str, body: Any = None) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        return connection

    def status(self, path: str) -> int:
        return self.send(path).getresponse().status

    def ask(self, path: str, body: Any = None) -> Any:
        answer = self.send(path, body).getresponse()
        content = json.loads(answer.read())
        assert answer.status == 200, content
        return content


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from tests.helpers.bundles.llama_bundle import llama_bundle

    models = tmp_path_factory.mktemp("small") / "models"
    shutil.copytree(llama_bundle() / "llama.cgb", models / "llama" / "1" / "model.cgb")
    write_tokenizer(models / "llama", letters=120)
    shutil.copytree(GOLDEN / "v1" / "cpu_mlp.cgb", models / "mlp" / "1" / "model.cgb")
    server = Process(models, "--threads", 1, "--poll", 0.1, "--ready", "all")
    server.models = models
    Running.until(lambda: server.status("/v2/health/ready") == 200)
    yield server
    server.process.kill()
    server.process.wait()


def test_texts_of_many_are_those_of_each_alone(process: Process) -> None:
    """More requests than lanes; greedy and sampled, with and without log-probabilities of other tokens."""
    order = random.Random(0)
    asked: list[dict[str, Any]] = []
    for number in range(24):
        prompt = order.choices(range(120), k=order.randrange(1, 40))
        how = {"temperature": 0} if number % 3 else {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": number}
        asked.append({"prompt": prompt, "max_tokens": order.randrange(1, 24), "logprobs": 1 if number % 2 else None, **how})
    with ThreadPoolExecutor(24) as threads:
        together = list(threads.map(lambda payload: process.ask("/v1/completions", payload), asked))
    for request, completion in zip(asked, together, strict=True):
        alone = process.ask("/v1/completions", request | {"logprobs": None})
        assert [choice["text"] for choice in completion["choices"]] == [choice["text"] for choice in alone["choices"]]
        assert completion["usage"] == alone["usage"]
    health = process.ask("/health")
    state = health["models"]["llama"]
    assert health["torch"] is False and state["pages_used"] == state["running"] == state["waiting"] == 0


def test_one_process_serves_both_and_another_version_takes_over(process: Process) -> None:
    """The version that began an answer also finishes it."""
    row = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.0] * 16}
    ports = process.ask("/v2/models/mlp")
    reply = process.ask("/v2/models/mlp/infer", {"inputs": [row | {"name": ports["inputs"][0]["name"]}]})
    assert reply["model_name"] == "mlp" and process.ask("/v2/models/llama/ready") == {"ready": True}
    answer = process.send("/v2/models/llama/infer", {"inputs": []}).getresponse()
    assert answer.status == 400 and b"is a language model: POST to /v1/chat/completions" in answer.read()
    assert [model["id"] for model in process.ask("/v1/models")["data"]] == ["llama"]
    body = {"model": "llama", "prompt": "abc", "max_tokens": 50, "temperature": 0, "ignore_eos": True}
    before = process.ask("/v1/completions", body)
    open_one = process.send("/v1/completions", body | {"stream": True, "logprobs": 1}).getresponse()
    open_one.readline()
    version_folder = process.models.parent / "made"
    shutil.copytree(process.models / "llama" / "1", version_folder)
    version_folder.rename(process.models / "llama" / "2")
    Running.until(lambda: process.ask("/health")["models"]["llama"]["version"] == 2)
    assert open_one.read().decode().endswith("data: [DONE]\n\n")
    assert process.ask("/v1/completions", body)["choices"] == before["choices"]


def test_preempted_texts_continue_as_before(process: Process) -> None:
    """There are five pages for two lanes, which need up to four each. A text that lost its pages is recomputed and continues as
    before, also with sampling and a penalty."""
    from cgserve.language.bundle_model import BundleModel
    from cgserve.scheduling.requests import Request, Sampling
    from cgserve.scheduling.scheduler import Scheduler
    from tests.helpers.bundles.llama_bundle import llama_bundle

    runs, order = [], random.Random(0)
    sampled = Sampling(temperature=0.9, top_p=0.95, penalty=1.2, seed=4)
    greedy = Sampling(temperature=0.0)
    requests = [
        Request(prompt=tuple(order.choices(range(120), k=9 + number)), most=40, sampling=greedy if number % 2 else sampled)
        for number in range(4)
    ]
    with cgbundle.load(llama_bundle() / "llama.cgb") as program:
        model = BundleModel(program, 8)
        for pages in (model.limits.pages, 6):
            scheduler, texts = Scheduler(replace(model.limits, pages=pages)), {}
            for key, request in enumerate(requests):
                scheduler.add(key, request)
            while (step := scheduler.next()) is not None:
                for progress in scheduler.finish(model.prepare(step)(None).rows()):
                    texts[progress.key] = texts.get(progress.key, []) + [token.id for token in progress.tokens]
            runs.append(texts)
            assert (scheduler.preempted > 0) == (pages == 6) and scheduler.pages.taken == 0
    assert runs[0] == runs[1] and all(len(text) == 40 for text in runs[0].values())


def test_restricted_answers_are_the_same_together_and_alone(process: Process) -> None:
    """Biases, penalties and log-probabilities of a prompt in a bundle; with a grammar if its engine is installed."""
    order, asked = random.Random(1), list[dict[str, Any]]()
    forms = {"presence_penalty": 1.5, "frequency_penalty": 0.5}, {"logit_bias": {"7": 3, "8": -3}}, {"echo": True, "logprobs": 1}
    for number in range(12):
        prompt = order.choices(range(120), k=order.randrange(2, 20))
        body = {"prompt": prompt, "max_tokens": order.randrange(2, 20), **forms[number % 3]}
        asked.append(body | ({"temperature": 0} if number % 2 else {"seed": number, "min_p": 0.05}))
    if importlib.util.find_spec("llguidance"):
        form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["a", "aa", "bc", 7]}}}
        asked += [{"prompt": "abc", "max_tokens": 20, "seed": seed, "response_format": form} for seed in range(6)]
    with ThreadPoolExecutor(24) as threads:
        together = list(threads.map(lambda payload: process.ask("/v1/completions", payload), asked))
    for request, completion in zip(asked, together, strict=True):
        assert [choice["text"] for choice in process.ask("/v1/completions", request)["choices"]] == [
            choice["text"] for choice in completion["choices"]
        ]
        if "response_format" in request:
            (choice,) = completion["choices"]
            assert json.loads(choice["text"]) in ("a", "aa", "bc", 7) and choice["finish_reason"] == "stop"


def test_a_signal_drains_it(process: Process) -> None:
    connection = process.send("/v1/completions", {"prompt": "abc", "max_tokens": 60, "stream": True, "logprobs": 1})
    answer = connection.getresponse()
    answer.readline()
    process.process.send_signal(signal.SIGTERM)
    assert answer.read().decode().endswith("data: [DONE]\n\n")
    assert process.process.wait(60) == 0


def test_a_bundle_that_is_not_there(tmp_path: Path) -> None:
    started = Process(tmp_path / "none.cgb", "--tokenizer", tmp_path)
    assert started.line.startswith(f"error: --tokenizer {tmp_path}: no tokenizer.json") and started.process.wait(60) == 2
    started = Process(tmp_path / "none.cgb")
    assert "none.cgb: no such bundle" in started.line and started.process.wait(60) == 2


def test_a_bundle_of_another_model() -> None:
    from cgserve.language.bundle_model import is_language_model

    assert not is_language_model(SimpleNamespace(entries=[SimpleNamespace(name="forward")], weights=[]))


# --- OpenAI's client ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    openai = pytest.importorskip("openai", reason="pip install '.[dev]'")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def test_openai_completions(client: Any, server: Running) -> None:
    reply = client.completions.create(model="script", prompt="abc", max_tokens=12, seed=0, logprobs=1)
    assert reply.choices[0].text == said(3, 12) and reply.usage.total_tokens == 15 and reply.choices[0].finish_reason == "length"
    pieces = list(client.completions.create(model="script", prompt="abc", max_tokens=12, seed=0, stream=True))
    assert "".join([piece.choices[0].text for piece in pieces]) == said(3, 12)
    assert [model.id for model in client.models.list()] == ["script"]


def test_openai_chat(client: Any, server: Running) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    reply = client.chat.completions.create(
        model="script", messages=messages, max_completion_tokens=60, seed=0, stop="END", n=2, logprobs=True, top_logprobs=3
    )
    assert all("END" not in choice.message.content and choice.finish_reason == "stop" for choice in reply.choices)
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 3
    stream = client.chat.completions.create(
        model="script", messages=messages, max_tokens=9, seed=0, stream=True, stream_options={"include_usage": True}
    )
    pieces = list(stream)
    assert "".join([piece.choices[0].delta.content for piece in pieces if piece.choices]) == said(19, 9)
    assert pieces[-1].usage.completion_tokens == 9


def test_openai_leaves_a_stream(client: Any, server: Running) -> None:
    with client.completions.create(model="script", prompt="abc", max_tokens=100, seed=0, stream=True) as stream:
        next(iter(stream))
    server.until_free()


def test_openai_errors(client: Any, server: Running) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="no model 'other'; there is script"):
        client.completions.create(model="other", prompt="abc")
    with pytest.raises(openai.BadRequestError, match="the model takes 120 tokens") as caught:
        client.completions.create(model="script", prompt="abc", max_tokens=1000)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"


def test_a_far_too_long_prompt_is_not_tokenized(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a prompt may fit, only its beginning is tokenized at first. Health requests are answered meanwhile."""
    with running(folder) as server:
        lengths: list[int] = []
        language, gate = server.served.language, threading.Event()
        tokens = language.tokens

        def counted(text: str, *, special: bool) -> tuple[int, ...]:
            assert gate.wait(60)
            lengths.append(len(text))
            return tokens(text, special=special)

        monkeypatch.setattr(language, "tokens", counted)
        context = server.served.context
        with ThreadPoolExecutor(1) as clients:
            asking = clients.submit(server.ask, "/v1/completions", {"prompt": "a" * server.served.characters})
            assert server.ask("/health")[0] == 200
            gate.set()
            status, reply, _ = asking.result()
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
        assert lengths in ([], [4 * context]) or max(lengths) <= server.served.characters
        lengths.clear()
        for body in ({"prompt": "a" * (server.served.characters + 1)}, {"prompt": ["a" * 100_000]}):
            status, reply, _ = server.ask("/v1/completions", body)
            assert status == 400 and "characters" in reply["error"]["message"]
        assert not lengths
        assert server.complete("abc")["choices"]
