"""Tool calls in a model's text: how its chat template writes them, their grammar, and their parser.

If a template does not support tools, they are described in the first message, and calls are plain JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .grammars import schema_rule

CALLS = 16
"""Maximum calls in an answer with a grammar."""

DECODER = json.JSONDecoder()

INSTRUCTIONS = """You may call these functions:
{tools}
To call one, answer with nothing but a JSON object: {{"name": the function's name, "arguments": an object of its arguments}}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function that a model may call; `parameters`: the JSON schema of its arguments; `definition`: its entry in the body."""

    name: str
    parameters: Mapping[str, Any]
    definition: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolbox:
    """The tools of a body.  `choice`: "none", "auto", "required", or with `name` that tool; `parallel`: allows several calls."""

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    name: str | None = None
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        return tuple([tool for tool in self.tools if self.name in (None, tool.name)]) if self.choice != "none" else ()

    @property
    def forced(self) -> bool:
        return self.choice == "required"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolForm:
    """How a template writes calls: each call between `begin` and `end`, all calls between `opening` and `closing`, separated by
    `between`; `key`: the JSON key of the arguments.  `lists_tools`: whether the template describes the tools; `shown`: whether
    decoded text contains `begin`."""

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
"""Texts that are a single token in some tokenizers."""

MARKS = re.compile(r"\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)?\s*")
"""Marks before calls without tags; decoding drops them if they are special tokens."""


def tool_form(template: str) -> ToolForm:
    """Detects the form of a chat template by its source."""
    if not re.search(r"\btools\b", template):
        return replace(JSON, lists_tools=False)
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA if "<|python_tag|>" in template or '"parameters": ' in template else JSON


def answer_grammar(schema: Mapping[str, Any] | None, box: Toolbox, form: ToolForm, special: Mapping[str, int]) -> str:
    """Returns the grammar of an answer, in llguidance's variant of Lark: JSON of a schema, tool calls, or either.  `special`:
    tokens of TAGS that have no text."""
    rules, alternatives = [], []
    if schema is not None and not box.forced:
        rules, alternatives = [schema_rule("answer", schema)], ["answer"]
    if box.callable:
        rules, alternatives = rules + calls_rules(box, form, special), [*alternatives, "calls"]
    return "\n".join([f"start: {' | '.join(alternatives)}", *rules]) + "\n"


def calls_rules(box: Toolbox, form: ToolForm, special: Mapping[str, int]) -> list[str]:
    """Returns the rules for tool calls, beginning with `calls`."""
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
    """Returns the messages for a template; arguments of earlier calls become objects.  If the template does not support tools, the
    first message describes them, and calls and results become text."""
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
    """Parses the arguments of a message's calls, which OpenAI's clients send as text."""
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
    """Converts a message with calls or a result to text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"The function gave: {message['content']}"}
    functions = [call["function"] for call in message.get("tool_calls") or () if isinstance(call, dict) and "function" in call]
    if not functions:
        return message
    lines = [json.dumps({name: function.get(name) for name in ("name", "arguments")}) for function in functions]
    return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *lines])}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in an answer: number `index`, the tool `name`, and `arguments` as JSON."""

    index: int
    name: str
    arguments: str


class CallReader:
    """Extracts calls from an answer's text incrementally.  Everything that is not a call of one of the tools is text."""

    def __init__(self, tools: Sequence[Tool], form: ToolForm) -> None:
        self._names, self._form = {tool.name for tool in tools}, form
        self._buffer, self._count = "", 0
        self._text = False  # whether no call can follow

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Returns the text and calls that are certain now."""
        self._buffer += text
        return self._tagged(end=False) if self._form.begin and self._form.shown else self._bare(end=False)

    def end(self) -> tuple[str, list[ToolCall]]:
        """Returns the remaining text and calls."""
        return self._tagged(end=True) if self._form.begin and self._form.shown else self._bare(end=True)

    def _tagged(self, *, end: bool) -> tuple[str, list[ToolCall]]:
        """Parses calls between tags, each as soon as it is complete."""
        opens, closes = self._form.begin.strip(), self._form.end.strip()
        text, calls = "", list[ToolCall]()
        while (start := self._buffer.find(opens)) >= 0:
            stop = self._buffer.find(closes, start)
            if stop < 0 and not end:
                break
            inner = self._buffer[start + len(opens) : stop if stop >= 0 else None]
            rest = self._buffer[stop + len(closes) :] if stop >= 0 else ""
            new_calls = self._read(inner)
            text += self._buffer[:start].rstrip() if new_calls else self._buffer[: len(self._buffer) - len(rest)]
            calls += new_calls
            self._buffer = rest.lstrip() if new_calls else rest
        certain = len(self._buffer) - (0 if end else held_back(self._buffer, opens))
        if start >= 0:
            certain = len(self._buffer[:start].rstrip())
        text, self._buffer = text + self._buffer[:certain], self._buffer[certain:]
        return text, calls

    def _bare(self, *, end: bool) -> tuple[str, list[ToolCall]]:
        """Parses calls without tags: an answer that begins like JSON is parsed at its end."""
        begins = self._buffer.lstrip()[:1]
        if not self._text and not end and (not begins or begins in "{[<"):
            return "", []
        calls = [] if self._text else self._read(self._buffer)
        text, self._buffer, self._text = "" if calls else self._buffer, "", True
        return text, calls

    def _read(self, text: str) -> list[ToolCall]:
        """Returns the calls of a text, [] if it contains anything else."""
        values, position = list[Any](), MARKS.match(text).end()  # type: ignore[union-attr]
        try:
            while position < len(text):
                value, position = DECODER.raw_decode(text, position)
                values += value if isinstance(value, list) else [value]
                position = len(text) - len(text[position:].lstrip("; ,\n\t\r"))
        except ValueError:
            return []
        calls = [self._call(value) for value in values]
        if not calls or None in calls:
            return []
        self._count += len(calls)
        return [replace(call, index=self._count - len(calls) + number) for number, call in enumerate(calls) if call is not None]

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        return ToolCall(0, value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def held_back(text: str, tag: str) -> int:
    """Returns how many characters at the end of a text may begin a tag, including white space before it."""
    size = next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
    return len(text) - len(text[: len(text) - size].rstrip())
