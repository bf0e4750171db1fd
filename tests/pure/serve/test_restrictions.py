"""bundles/cgserve/restrictions: rules for each token, tool calls in text, and the options of a request body."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="pip install '.[serve]'")

from cgbundle.tensors.tensor import empty
from cgserve.language.chooser import Chooser
from cgserve.restrictions.fields import biases_of, schema_of, toolbox_of
from cgserve.restrictions.rules import TokenRules, Wishes
from cgserve.restrictions.tools import (
    HERMES,
    JSON,
    LLAMA,
    MISTRAL,
    TAGS,
    CallReader,
    Toolbox,
    answer_grammar,
    template_messages,
    tool_form,
)  # fmt: skip
from cgserve.scheduling.requests import Lane, Sampling
from tests.helpers.models.tokenizers import END, byte_tokenizer

GET = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
PUT = {"type": "function", "function": {"name": "put"}}
BOX = toolbox_of({"tools": [GET, PUT]})


def allowed(words: array[int], count: int = 100) -> list[int]:
    return [token for token in range(count) if words[token // 32] >> token % 32 & 1]


# --- rules ------------------------------------------------------------------------------------------------------------


class Counting:
    """A grammar that allows the tokens 5, 6, 7 and then the end token 99. It reports an error for token 66."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, token: int) -> str | None:
        self.taken.append(token)
        return "too complex" if token == 66 else None

    def write(self, words: array[int]) -> str | None:
        token = 5 + len(self.taken) if len(self.taken) < 3 else 99
        words[:] = array("i", [1 << token % 32 if place == token // 32 else 0 for place in range(len(words))])
        return None


def test_a_mask_follows_the_text_also_where_it_is_read_again() -> None:
    rules = TokenRules(100, 10, Wishes(), (99,), Counting())
    assert rules.follow(10, 3, fresh=True) == {} and allowed(rules.words) == [5]
    rules.follow(11, 5, fresh=False)
    assert allowed(rules.words) == [6]
    rules.follow(11, 5, fresh=True)
    assert allowed(rules.words) == [6], "the same place again: no token is taken twice"
    rules.follow(12, 6, fresh=True)
    rules.follow(13, 7, fresh=False)
    assert allowed(rules.words) == [99] and rules.failure is None
    with pytest.raises(AssertionError, match="5 tokens behind the prompt, after 3"):
        rules.follow(15, 7, fresh=False)


def test_a_grammar_that_gave_up_lets_the_answer_end() -> None:
    rules = TokenRules(100, 0, Wishes(), (98, 31), Counting())
    rules.follow(0, 0, fresh=True)
    rules.follow(1, 66, fresh=False)
    assert rules.failure == "too complex" and allowed(rules.words) == [31, 98]


def test_a_grammar_that_no_token_continues_gives_up() -> None:
    rules = TokenRules(100, 0, Wishes(), (98,), SimpleNamespace(take=lambda token: None, write=clear))
    rules.follow(0, 0, fresh=True)
    assert rules.failure == "the model has no token that may come next" and allowed(rules.words) == [98]


def clear(words: array[int]) -> None:
    words[:] = array("i", [0]) * len(words)


def test_no_end_before_its_time() -> None:
    rules = TokenRules(100, 4, Wishes(least=2), (99, 31), None)
    for count, wanted in enumerate((98, 98, 100, 100)):
        rules.follow(4 + count, 7, fresh=False)
        assert len(allowed(rules.words)) == wanted
    forced = TokenRules(100, 0, Wishes(least=9), (5,), Counting())
    forced.follow(0, 0, fresh=True)
    assert allowed(forced.words) == [5], "nothing else may come"


def test_penalties_count_the_tokens_of_the_answer() -> None:
    rules = TokenRules(100, 3, Wishes(biases={8: 2.0, 9: -1.0}, presence=0.5, frequency=0.25), (99,), None)
    assert rules.follow(3, 42, fresh=True) == {8: 2.0, 9: -1.0}, "42 is the prompt's"
    assert rules.follow(4, 8, fresh=False) == {8: 1.25}
    assert rules.follow(5, 8, fresh=False) == {8: 1.0}
    assert rules.follow(6, 7, fresh=False) == {7: -0.75}
    assert rules.follow(6, 7, fresh=True) == {7: -0.75, 8: 1.0, 9: -1.0}, "a slot that is new gets all of them"


# --- the entry `choose` --------------------------------------------------------------------------------------------------


def test_calls_of_choose() -> None:
    """Several calls are made if there are more lanes than the largest size, or more biases than one call can set."""
    seen: list[Any] = []

    def call(slot: Any, place: Any, sampling: Any, restriction: Any) -> Any:
        mask, token, bias, fresh = [tensor.tolist() for tensor in restriction]
        rows = [dict(zip(*pair, strict=True)) for pair in zip(token, bias, strict=True)]
        seen.append((slot.tolist(), place.tolist(), mask, rows, fresh, sampling[0].tolist()))
        tokens = empty("int64", (2,))
        tokens[(slice(0, 2),)] = place
        return {"token": tokens, "logprob": empty("float32", (2,))}

    call.inputs = [SimpleNamespace(shape=("batch", size)) for size in (2, 3, 3, 0)]  # type: ignore[attr-defined]
    chooser = Chooser(call, [2])  # type: ignore[arg-type]
    biases = {token: token / 4 for token in range(1, 6)}
    lanes = [
        Lane(
            key, (7,), 10 + key, [], 1 + key, 1, (), Sampling(temperature=key), 0, -1, TokenRules(40, 11 + key, wishes, (1,), None)
        )
        for key, wishes in enumerate((Wishes(least=1), Wishes(biases=biases), Wishes(biases={0: 3.0})))
    ]
    following = chooser.follow(lanes, [7, 7, 7], fresh=True)
    assert [token.id for token in chooser.choose(lanes, following, fresh=True)] == [11, 12, 13]
    first, more, last = seen
    assert first[:3] == ([1, 2], [11, 12], [[-3, -1], [-1, -1]]) and first[4] == [1, 1] and first[5] == [0.0, 1.0]
    assert first[3] == [{0: 0.0}, {1: 0.25, 2: 0.5, 3: 0.75}] and more[3] == [{0: 0.0}, {4: 1.0, 5: 1.25}]
    assert more[0] == [1, 2] and more[4] == [0, 0]
    assert last[0] == [3, 0] and last[1][0] == 13 and last[3][0] == {0: 3.0}


# --- calls of tools ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, 'So:\n<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>', "So:", [("get", '{"a": 1}')]),
        (
            HERMES, '<tool_call>{"name": "get", "arguments": {}}</tool_call>\n<tool_call>{"name": "put"}</tool_call>', "",
            [("get", "{}"), ("put", "{}")],
        ),
        (HERMES, 'a <tool_call>{"name": "other"}</tool_call> b', 'a <tool_call>{"name": "other"}</tool_call> b', []),
        (HERMES, "1 < 2 <tool", "1 < 2 <tool", []),
        (HERMES, '<tool_call>\n{"name": "put"', '<tool_call>\n{"name": "put"', []),
        (MISTRAL, ' [{"name": "get", "arguments": {"a": 2}}, {"name": "put"}]', "", [("get", '{"a": 2}'), ("put", "{}")]),
        (MISTRAL, '[TOOL_CALLS][{"name": "put"}]', "", [("put", "{}")]),
        (LLAMA, '<|python_tag|>{"name": "get", "parameters": {"a": 3}}', "", [("get", '{"a": 3}')]),
        (LLAMA, '{"name": "get", "parameters": {}}; {"name": "put"}', "", [("get", "{}"), ("put", "{}")]),
        (JSON, '{"name": "get", "arguments": {"a": 4}}\n', "", [("get", '{"a": 4}')]),
        (JSON, '{"name": "get"} is it', '{"name": "get"} is it', []),
        (JSON, '{"a": 1}', '{"a": 1}', []),
        (replace(HERMES, shown=False), '\n{"name": "put"}\n\n{"name": "get"}\n', "", [("put", "{}"), ("get", "{}")]),
        (JSON, 'No: {"name": "get"}', 'No: {"name": "get"}', []),
    ],
)  # fmt: skip
def test_calls_in_a_text(form: Any, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """Calls are found however the text is split into pieces."""
    for size in (1, 7, 1000):
        reader, said, parsed_calls = CallReader(BOX.tools, form), "", []
        for piece in [*[reader.push(text[at : at + size]) for at in range(0, len(text), size)], reader.end()]:
            said, parsed_calls = said + piece[0], parsed_calls + piece[1]
        assert (said, [(call.name, call.arguments) for call in parsed_calls]) == (content, calls)
        assert [call.index for call in parsed_calls] == list(range(len(parsed_calls)))


def test_a_tagged_call_is_told_when_it_ends() -> None:
    reader = CallReader(BOX.tools, HERMES)
    assert reader.push('Hm. <tool_call>{"name": "put"}</tool_') == ("Hm.", [])
    assert [call.name for call in reader.push("call>")[1]] == ["put"] and reader.end() == ("", [])


def test_the_form_of_a_template() -> None:
    assert tool_form("{% if tools %}<tool_call>{% endif %}") == HERMES and tool_form("{{ tools }}[TOOL_CALLS]") == MISTRAL
    assert tool_form('{{ tools }}"parameters": ') == LLAMA and tool_form("{{ tools }}") == JSON
    assert not tool_form("<tool_call> {{ messages }}").lists_tools


def test_messages_for_a_template() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}]
    messages = [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]  # fmt: skip
    known = template_messages(messages, BOX.tools, HERMES)
    assert known[0] is messages[0] and known[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    plain = template_messages(messages, BOX.tools, tool_form(""))
    assert plain[0]["content"].startswith("You may call these functions:\n") and plain[0]["content"].endswith("\n\nHi")
    assert json.dumps(GET["function"]) in plain[0]["content"]
    assert plain[1:] == [
        {"role": "assistant", "content": '{"name": "get", "arguments": {"a": 1}}'},
        {"role": "user", "content": "The function gave: 2"},
    ]
    assert template_messages(messages[:1], (), tool_form("")) == messages[:1]


# --- options of a request body ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "body", "text"),
    [
        (schema_of, {"type": "json_schema"}, "response_format.json_schema.schema: expected an object"),
        (schema_of, "json", "response_format.type: expected text, json_object or json_schema"),
        (toolbox_of, {"tools": {}}, "tools: expected a list of up to 128"),
        (toolbox_of, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name: expected 1 to 64"),
        (toolbox_of, {"tools": [GET, GET]}, "tools: two functions have the same name"),
        (toolbox_of, {"tools": [GET], "tool_choice": "any"}, "tool_choice: expected none, auto, required or a function"),
        (toolbox_of, {"tool_choice": "required"}, "tool_choice: required, and there are no tools"),
        (
            toolbox_of, {"tools": [GET], "tool_choice": {"type": "function", "function": {"name": "put"}}},
            "tool_choice: expected the function of one of the tools, get",
        ),
        (toolbox_of, {"tools": [GET], "parallel_tool_calls": 1}, "parallel_tool_calls: expected true or false"),
        (biases_of, {"a": 1}, "logit_bias: expected tokens with a number from -100 to 100"),
        (biases_of, {str(token): 1 for token in range(1025)}, "logit_bias: expected an object of up to 1024 tokens"),
    ],
)  # fmt: skip
def test_what_is_refused(read: Any, body: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(body)
    assert str(caught.value).startswith(text)


def test_which_tools_may_be_called() -> None:
    assert BOX.choice == "auto" and BOX.callable == BOX.tools and not BOX.forced
    assert not toolbox_of({"tools": [GET], "tool_choice": "none"}).callable and not toolbox_of({}).callable
    named = toolbox_of({"tools": [GET, PUT], "tool_choice": {"type": "function", "function": {"name": "put"}}})
    assert [tool.name for tool in named.callable] == ["put"] and named.forced and not named.parallel
    assert biases_of({"7": 0, "8": -3}) == {8: -3.0}


# --- the engine ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grammars() -> Any:
    pytest.importorskip("llguidance", reason="pip install '.[grammar]'")
    from cgserve.restrictions.grammars import Grammars

    return Grammars(byte_tokenizer().to_str(), 300, (END,))


def taken(grammars: Any, grammar: str, text: str) -> bool:
    """Returns whether a text obeys a grammar and may end there. Checks that the mask allows each of its tokens."""
    rules = TokenRules(300, 0, Wishes(), (END,), grammars.matcher(grammar))
    tokens = [*byte_tokenizer().encode(text, add_special_tokens=False).ids, END]
    for place, token in enumerate([0, *tokens]):
        rules.follow(place, token, fresh=place == 0)
        if place < len(tokens) and tokens[place] not in allowed(rules.words, 300):
            return False
    return rules.failure is None and not [token for token in allowed(rules.words, 300) if token > END]


@pytest.mark.parametrize(
    ("text", "fits"), [('{"a": 12}', True), ('{"a": 123}', False), ('{"a":12}', False), ('{"a": 12} ', False), ("{}", False)]
)
def test_a_grammar_of_a_schema(grammars: Any, text: str, fits: bool) -> None:
    schema = {
        "type": "object", "properties": {"a": {"$ref": "#/$defs/small"}}, "required": ["a"], "additionalProperties": False,
        "$defs": {"small": {"type": "integer", "maximum": 99}},
    }  # fmt: skip
    assert taken(grammars, answer_grammar(schema, Toolbox(), HERMES, {}), text) is fits


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA, JSON])
def test_a_grammar_of_calls(grammars: Any, form: Any) -> None:
    """Texts that the grammar allows are parsed as calls."""
    head = f'{{"name": "get", "{form.key}": '
    call, put = f'{form.begin}{head}{{"a": 1}}}}{form.end}', f"{form.begin}{head.replace('get', 'put')}{{}}}}{form.end}"
    one, two = form.opening + call + form.closing, form.opening + call + form.between + put + form.closing
    box = toolbox_of({"tools": [GET, PUT], "tool_choice": "required"})
    alone = toolbox_of({"tools": [GET, PUT], "tool_choice": "required", "parallel_tool_calls": False})
    named = toolbox_of({"tools": [GET, PUT], "tool_choice": {"type": "function", "function": {"name": "put"}}})
    free = toolbox_of({"tools": [GET, PUT]})
    either = answer_grammar({"type": "integer"}, free, form, {})
    for grammar, wanted in (
        (answer_grammar(None, box, form, {}), (True, True, False)), (answer_grammar(None, alone, form, {}), (True, False, False)),
        (answer_grammar(None, named, form, {}), (False, False, False)), (either, (True, True, True)),
    ):  # fmt: skip
        assert tuple([taken(grammars, grammar, text) for text in (one, two, "12")]) == wanted
    reader = CallReader(BOX.tools, form)
    content, calls = reader.push(two)
    more, others = reader.end()
    assert [call.name for call in calls + others] == ["get", "put"] and content + more == ""


def test_tags_that_are_tokens() -> None:
    """Tokenizers of Qwen and Mistral have a token for each tag of a call, which their models were trained to generate."""
    pytest.importorskip("llguidance", reason="pip install '.[grammar]'")
    from tokenizers import AddedToken

    from cgserve.restrictions.grammars import Grammars

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in TAGS[:2]])
    tokenizer.add_special_tokens([AddedToken(TAGS[2], special=True)])
    grammars, box = Grammars(tokenizer.to_str(), 300, (END,)), toolbox_of({"tools": [PUT], "tool_choice": "required"})
    special = grammars.special(TAGS)
    assert special == {tag: END + 1 + place for place, tag in enumerate(TAGS)}
    for form, text in (
        (HERMES, '<tool_call>\n{"name": "put", "arguments": {}}\n</tool_call>'),
        (MISTRAL, '[TOOL_CALLS][{"name": "put", "arguments": {}}]'),
    ):
        rules = TokenRules(300, 0, Wishes(), (END,), grammars.matcher(answer_grammar(None, box, form, special)))
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokens[0] > END
        for place, token in enumerate([0, *tokens]):
            rules.follow(place, token, fresh=False)
            assert rules.failure is None and (place == len(tokens) or tokens[place] in allowed(rules.words, 300))
        assert END in allowed(rules.words, 300)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "objet"}, "Invalid type: objet"), ({"$ref": "#/x"}, "Pointer '/x' does not exist"),
        ({"type": "string", "pattern": "("}, "regex parse error: ( ^ error: unclosed group"),
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"enum": ["a" * 70_000]}, "70136 characters of schemas; at most 65536 are allowed"),
    ],
)  # fmt: skip
def test_schemas_that_the_engine_refuses(grammars: Any, schema: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        grammars.matcher(answer_grammar(schema, Toolbox(), HERMES, {}))
    assert str(caught.value) == text
