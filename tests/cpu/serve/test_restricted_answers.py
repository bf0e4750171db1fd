"""response_format, tools, biases and penalties over real HTTP: a fast model with known output, and the `openai` client."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.helpers.models.tokenizers import byte_tokenizer, write_tokenizer
from tests.helpers.scripted_server import Running, running, said

for package in ("starlette", "uvicorn", "prometheus_client", "tokenizers", "jinja2", "llguidance"):
    pytest.importorskip(package, reason="pip install '.[serve,grammar]'")

CHAT = "{# <tool_call> #}{% for each in messages %}{{ each.content }}{% endfor %}{{ tools | length if tools else '' }}:"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "array", "minItems": 1, "items": {"enum": [7]}}},
    "required": ["a", "b"], "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA, "strict": True}}
ONE = {"a": {"enum": ["x"]}}
TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "required": ["a"], "properties": ONE}}},
    {"type": "function", "function": {"name": "put", "parameters": SCHEMA}},
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "put"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, chat_template=CHAT)
    with running(folder) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    openai = pytest.importorskip("openai", reason="pip install '.[dev]'")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def fits(text: str) -> bool:
    pair = json.loads(text)
    return list(pair) == ["a", "b"] and len(pair["a"]) <= 5 and set(pair["b"]) == {7}


# --- response_format ----------------------------------------------------------------------------------------------------


def test_answers_keep_to_a_schema(server: Running) -> None:
    """Several restricted answers and a free one run together, complete and streamed, with log-probabilities."""
    completion = server.chat("Hi", response_format=FORMAT, n=3)
    assert all(fits(choice["message"]["content"]) and choice["finish_reason"] == "stop" for choice in completion["choices"])
    *pieces, _ = server.chat("Hi", response_format=FORMAT, stream=True, logprobs=True)
    text = "".join([piece["choices"][0]["delta"]["content"] for piece in pieces])
    assert text == completion["choices"][0]["message"]["content"]
    tokens = [token["token"] for piece in pieces for token in piece["choices"][0]["logprobs"]["content"]]
    assert "".join(tokens) == text.replace(" ", "Ġ") or "".join(tokens) == text
    assert server.chat("Hi", max_tokens=9)["choices"][0]["message"]["content"] == said(3, 9), "a free answer is as before"
    server.until_free()


def test_any_object_and_completions(server: Running) -> None:
    choice = server.complete("abc", response_format={"type": "json_object"}, max_tokens=60)["choices"][0]
    assert choice["finish_reason"] == "stop" and json.loads(choice["text"]) == {}
    cut = server.chat("Hi", response_format=FORMAT, max_tokens=4)["choices"][0]
    assert cut["finish_reason"] == "length" and cut["message"]["content"] == '{"a"'
    stopped = server.chat("Hi", response_format=FORMAT, stop='"b"')["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["message"]["content"].endswith(", ")
    server.until_free()


def test_a_grammar_ends_an_answer_that_ignores_the_end(server: Running) -> None:
    assert server.chat("Hi", response_format=FORMAT, ignore_eos=True)["choices"][0]["finish_reason"] == "stop"
    assert fits(server.chat("Hi", response_format=FORMAT, min_tokens=100)["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("more", "field", "text"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format",
            "Invalid type: x",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}], "tool_choice": "required"},
            "tools", "Invalid type: x",
        ),
        ({"tools": TOOLS, "tool_choice": "all"}, "tools", "tool_choice: expected none, auto, required or a function"),
    ],
)  # fmt: skip
def test_what_is_refused(server: Running, more: Any, field: str, text: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **more}
    status, response, _ = server.ask("/v1/chat/completions", body)
    assert (status, response["error"]["param"]) == (400, field) and response["error"]["message"].endswith(text)


def test_without_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path, chat_template=CHAT)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with running(tmp_path) as server:
        body = {"messages": [{"role": "user", "content": "a"}], "response_format": FORMAT}
        status, response, _ = server.ask("/v1/chat/completions", body)
        wanted = "response_format: this server needs llguidance: pip install 'cgcompile[grammar]'"
        assert (status, response["error"]["message"]) == (400, wanted)
        assert server.chat("Hi", max_tokens=5, logit_bias={"7": 1}, min_tokens=2)["choices"], "which asks for no grammar"


def test_a_grammar_that_gives_up_is_an_error(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from cgserve.restrictions.grammars import GrammarMatcher

    monkeypatch.setattr(GrammarMatcher, "take", lambda matcher, token: "too complex")
    body = {"messages": [{"role": "user", "content": "Hi"}], "seed": 0, "response_format": FORMAT}
    status, response, _ = server.ask("/v1/chat/completions", body)
    assert (status, response["error"]["message"]) == (400, "response_format: the grammar engine gave up: too complex")
    status, events, _ = server.ask("/v1/chat/completions", body | {"stream": True})
    assert status == 200 and events[-1]["error"]["message"].endswith("too complex")
    server.until_free()


# --- tools --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_that_are_forced(server: Running, choice: Any) -> None:
    for stream in (False, True):
        response = server.chat("Hi", tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, stream=stream)
        if stream:
            choices = [chunk["choices"][0] for chunk in response[:-1]]
            calls = [call for piece in choices for call in piece["delta"].get("tool_calls", [])]
            assert "".join([piece["delta"].get("content") or "" for piece in choices]) == "" and calls[0]["index"] == 0
        else:
            choices, calls = response["choices"], response["choices"][0]["message"]["tool_calls"]
            assert response["choices"][0]["message"]["content"] is None
        (call,) = calls
        assert call["function"]["name"] == ("get" if choice == "required" else "put") and len(call["id"]) == 9
        assert json.loads(call["function"]["arguments"]) == {"a": "x"} or fits(call["function"]["arguments"])
        assert choices[-1]["finish_reason"] == "tool_calls"
    server.until_free()


def test_tools_that_may_be_called(server: Running) -> None:
    """The template receives the tools unless tool_choice is none; an answer without a call is text."""
    free = server.chat("Hi", tools=TOOLS, max_tokens=5)
    assert free["usage"]["prompt_tokens"] == 4 and free["choices"][0]["message"]["content"] == said(4, 5)
    none = server.chat("Hi", tools=TOOLS, tool_choice="none", max_tokens=5)
    assert none["usage"]["prompt_tokens"] == 3 and "tool_calls" not in none["choices"][0]["message"]
    either = server.chat("Hi", tools=TOOLS, response_format=FORMAT)["choices"][0]
    assert either["finish_reason"] in ("stop", "tool_calls")


def test_openai_client(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    ask = client.chat.completions.create
    completion = ask(model="script", messages=messages, tools=TOOLS, tool_choice="required", seed=0, parallel_tool_calls=False)
    (call,) = completion.choices[0].message.tool_calls
    assert completion.choices[0].finish_reason == "tool_calls" and call.function.name == "get"
    pieces = list(ask(model="script", messages=messages, tools=TOOLS, tool_choice=NAMED, seed=0, stream=True))
    calls = [tool_call for piece in pieces for tool_call in piece.choices[0].delta.tool_calls or []]
    assert [tool_call.function.name for tool_call in calls] == ["put"] and fits(calls[0].function.arguments)
    answered = [completion.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    assert ask(model="script", messages=messages + answered, tools=TOOLS, max_tokens=4).choices[0].finish_reason == "length"
    assert fits(ask(model="script", messages=messages, response_format=FORMAT, seed=0).choices[0].message.content)


def test_openai_parses_answers(client: Any) -> None:
    """The client's helpers parse a schema given by a class, and a stream with tool calls."""
    from pydantic import BaseModel

    class Pair(BaseModel):
        a: Literal["x", "y"]
        b: list[int]

    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    completion = client.chat.completions.parse(model="script", messages=messages, response_format=Pair, seed=0)
    assert isinstance(completion.choices[0].message.parsed, Pair)
    with client.chat.completions.stream(model="script", messages=messages, tools=TOOLS, tool_choice=NAMED, seed=0) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds and fits(call.function.arguments)


# --- biases, penalties, the shortest answer ----------------------------------------------------------------------------------


def test_biases_and_penalties(server: Running) -> None:
    letter = byte_tokenizer().encode("Z").ids[0]
    assert server.complete("abc", max_tokens=5, logit_bias={str(letter): 50})["choices"][0]["text"] == "ZZZZZ"
    penalized = server.complete("abc", max_tokens=5, logit_bias={str(letter): 1}, presence_penalty=1.5, n=2)
    assert [choice["text"][0] for choice in penalized["choices"]] == ["Z", "Z"]
    assert all(choice["text"].count("Z") == 1 for choice in penalized["choices"])
    counted = server.complete("abc", max_tokens=6, logit_bias={str(letter): 1}, frequency_penalty=0.4)["choices"][0]["text"]
    assert counted.startswith("ZZZ") and counted.count("Z") == 3
    server.until_free()


def test_the_shortest_answer(server: Running) -> None:
    from cgserve.scheduling.requests import Request

    requests: list[Request] = []
    opened = server.served.engine.open

    def noted(new_requests: Any) -> Any:
        requests.extend(new_requests)
        return opened(new_requests)

    server.served.engine.open = noted  # type: ignore[method-assign]
    try:
        server.complete("abc", max_tokens=3, min_tokens=2, min_p=0.25)
    finally:
        server.served.engine.open = opened  # type: ignore[method-assign]
    (request,) = requests
    assert request.rules is not None and request.sampling.min_p == 0.25
