"""Calls of tools in a model's text: how its chat template writes them, the grammar of that, and from text to calls.

A template that has no form of its own gets the tools as a text, and calls are plain JSON then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .grammars import schema_rule

CALLS = 16
"""Calls that a grammar lets an answer have."""

DECODER = json.JSONDecoder()

INSTRUCTIONS = """You may call these functions:
{tools}
To call one, answer with nothing but a JSON object: {{"name": the function's name, "arguments": an object of its arguments}}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function that a model may call; `parameters`: the JSON schema of its arguments; `definition`: the tool as the body has
    it."""

    name: str
    parameters: Mapping[str, Any]
    definition: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolbox:
    """What a body says of tools.  `choice`: "none", "auto", "required", or with `name` that one; `parallel`: several calls."""

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    name: str | None = None
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Those that the answer may call."""
        return tuple([tool for tool in self.tools if self.name in (None, tool.name)]) if self.choice != "none" else ()

    @property
    def forced(self) -> bool:
        """Whether the answer has to be calls."""
        return self.choice == "required"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolForm:
    """How a template writes calls: each between `begin` and `end`, all between `opening` and `closing`, with `between`; `key` names
    the arguments.  `lists_tools`: whether the template itself tells the model of tools; `shown`: whether text has what is around
    calls."""

    begin: str = ""
    end: str = ""
    opening: str = ""
    closing: str = ""
    between: str = "\n"
    key: str = "arguments"
    lists_tools: bool = True
    shown: bool = True


HERMES = ToolForm(begin="<tool_call>\n", end="\n</tool_call>")
MISTRAL = ToolForm(opening="[TOOL_CALLS][", closing="]", between=", ")
LLAMA = ToolForm(key="parameters", between="; ")
JSON = ToolForm()

TAGS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")
"""What is one token of its own in some tokenizers."""

MARKS = re.compile(r"\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)?\s*")
"""What stands in front of calls that are JSON alone, and is dropped where the tokenizer counts it as special."""


def tool_form(template: str) -> ToolForm:
    """The form of a chat template, by its source."""
    if not re.search(r"\btools\b", template):
        return replace(JSON, lists_tools=False)
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA if "<|python_tag|>" in template or '"parameters": ' in template else JSON


def answer_grammar(schema: Mapping[str, Any] | None, box: Toolbox, form: ToolForm, special: Mapping[str, int]) -> str:
    """The grammar of an answer, as Lark of llguidance's kind: JSON of a schema, calls of tools, or one of both.  `special`: tokens
    of TAGS that stand for no text."""
    rules, ways = [], []
    if schema is not None and not box.forced:
        rules, ways = [schema_rule("answer", schema)], ["answer"]
    if box.callable:
        rules, ways = rules + calls_rules(box, form, special), [*ways, "calls"]
    return "\n".join([f"start: {' | '.join(ways)}", *rules]) + "\n"


def calls_rules(box: Toolbox, form: ToolForm, special: Mapping[str, int]) -> list[str]:
    """Rules for calls of tools: `calls`."""
    tools, more = box.callable, f"more{{0,{CALLS - 1}}}" if box.parallel else ""

    def literal(text: str) -> str:
        pieces = [piece for piece in re.split(f"({'|'.join(map(re.escape, TAGS))})", text) if piece]
        return " ".join([f"<[{special[piece]}]>" if piece in special else json.dumps(piece) for piece in pieces])

    lines = [f"calls: {literal(form.opening)} call {more} {literal(form.closing)}"]
    if box.parallel:
        lines.append(f"more: {literal(form.between)} call")
    names = " | ".join([f"tool_{number}" for number in range(len(tools))])
    lines.append(f"call: {literal(form.begin)} ({names}) {literal(form.end)}")
    for number, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{form.key}": '
        lines += [f'tool_{number}: {literal(head)} arguments_{number} "}}"', schema_rule(f"arguments_{number}", tool.parameters)]
    return lines


def template_messages(messages: Sequence[dict[str, Any]], tools: Sequence[Tool], form: ToolForm) -> list[dict[str, Any]]:
    """The messages for a template: earlier calls have their arguments as objects; where the template knows no tools, the first
    message has these as a text, and calls and their results are texts."""
    parsed = [with_objects(message) for message in messages]
    if form.lists_tools:
        return parsed
    plain = [as_text(message) for message in parsed]
    if tools and plain:
        listed = "\n".join([json.dumps(tool.definition["function"], ensure_ascii=False) for tool in tools])
        first = INSTRUCTIONS.format(tools=listed) + "\n\n" + plain[0]["content"]
        plain[0] = {**plain[0], "content": first.rstrip()}
    return plain


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as objects, which OpenAI's clients send as texts."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message

    def parsed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            return call
        try:
            return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
        except ValueError:
            return call

    return {**message, "tool_calls": [parsed(call) for call in calls]}


def as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message of calls, or of what one gave, as a text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"The function gave: {message['content']}"}
    functions = [call["function"] for call in message.get("tool_calls") or () if isinstance(call, dict) and "function" in call]
    if not functions:
        return message
    lines = [json.dumps({name: function.get(name) for name in ("name", "arguments")}) for function in functions]
    return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *lines])}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an answer has: the `index`-th, of the tool `name`; `arguments` as JSON."""

    index: int
    name: str
    arguments: str


class CallReader:
    """Takes the calls out of an answer's text, as it comes.  What is no call of one of the tools is text."""

    def __init__(self, tools: Sequence[Tool], form: ToolForm) -> None:
        self._names, self._form = {tool.name for tool in tools}, form
        self._held, self._count = "", 0
        self._text = False  # whether what comes can be no call any more

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """What is certain now: text, and calls."""
        self._held += text
        return self._tagged(end=False) if self._form.begin and self._form.shown else self._bare(end=False)

    def end(self) -> tuple[str, list[ToolCall]]:
        """What is left."""
        return self._tagged(end=True) if self._form.begin and self._form.shown else self._bare(end=True)

    def _tagged(self, *, end: bool) -> tuple[str, list[ToolCall]]:
        """Of calls between tags, each as soon as it is whole."""
        opens, closes = self._form.begin.strip(), self._form.end.strip()
        text, calls = "", list[ToolCall]()
        while (start := self._held.find(opens)) >= 0:
            stop = self._held.find(closes, start)
            if stop < 0 and not end:
                break
            inner = self._held[start + len(opens) : stop if stop >= 0 else None]
            rest = self._held[stop + len(closes) :] if stop >= 0 else ""
            new_calls = self._read(inner)
            text += self._held[:start].rstrip() if new_calls else self._held[: len(self._held) - len(rest)]
            calls += new_calls
            self._held = rest.lstrip() if new_calls else rest
        certain = len(self._held) - (0 if end else held_back(self._held, opens))
        if start >= 0:
            certain = len(self._held[:start].rstrip())
        text, self._held = text + self._held[:certain], self._held[certain:]
        return text, calls

    def _bare(self, *, end: bool) -> tuple[str, list[ToolCall]]:
        """Of calls that are JSON: an answer that begins so is read when it has ended."""
        begins = self._held.lstrip()[:1]
        if not self._text and not end and (not begins or begins in "{[<"):
            return "", []
        calls = [] if self._text else self._read(self._held)
        text, self._held, self._text = "" if calls else self._held, "", True
        return text, calls

    def _read(self, text: str) -> list[ToolCall]:
        """The calls that a text consists of; none where anything else is in it."""
        values, at = list[Any](), MARKS.match(text).end()  # type: ignore[union-attr]
        try:
            while at < len(text):
                value, at = DECODER.raw_decode(text, at)
                values += value if isinstance(value, list) else [value]
                at = len(text) - len(text[at:].lstrip("; ,\n\t\r"))
        except ValueError:
            return []
        calls = [self._call(value) for value in values]
        if not calls or None in calls:
            return []
        self._count += len(calls)
        return [replace(call, index=self._count - len(calls) + place) for place, call in enumerate(calls) if call is not None]

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        return ToolCall(0, value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def held_back(text: str, tag: str) -> int:
    """Characters at the end of a text that may begin a tag, with the white space in front."""
    size = next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
    return len(text) - len(text[: len(text) - size].rstrip())
