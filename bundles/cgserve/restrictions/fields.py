"""Reads fields of a body that restrict an answer: response_format, tools with tool_choice, logit_bias.  The functions raise
ValueError for an invalid field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .grammars import ANYTHING
from .tools import Tool, Toolbox

TOOLS, BIASES = 128, 1024
"""Maximum tools and biases of a body."""

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def schema_of(asked: Any) -> Mapping[str, Any] | None:
    """Returns the JSON schema of a `response_format`, None for text."""
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return ANYTHING
    if kind != "json_schema":
        raise ValueError("response_format.type: expected text, json_object or json_schema")
    json_schema = asked.get("json_schema")
    if not isinstance(json_schema, dict) or not isinstance(json_schema.get("schema"), dict):
        raise ValueError("response_format.json_schema.schema: expected an object")
    schema: dict[str, Any] = json_schema["schema"]
    return schema


def toolbox_of(body: Mapping[str, Any]) -> Toolbox:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls`."""
    definitions = body.get("tools", [])
    if not isinstance(definitions, list) or len(definitions) > TOOLS:
        raise ValueError(f"tools: expected a list of up to {TOOLS}")
    tools = tuple([tool_of(tool, f"tools[{index}]") for index, tool in enumerate(definitions)])
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ValueError("tools: two functions have the same name")
    parallel = body.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        raise ValueError("parallel_tool_calls: expected true or false")
    choice = body.get("tool_choice", "auto" if tools else "none")
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if choice.get("type") == "function" and isinstance(function, dict) else None
        if name not in names:
            raise ValueError(f"tool_choice: expected the function of one of the tools, {', '.join(names) or 'and there is none'}")
        return Toolbox(tools=tools, choice="required", name=name, parallel=False)
    if choice not in ("none", "auto", "required"):
        raise ValueError("tool_choice: expected none, auto, required or a function")
    if choice == "required" and not tools:
        raise ValueError("tool_choice: required, and there are no tools")
    return Toolbox(tools=tools, choice=choice if tools else "none", parallel=parallel)


def tool_of(definition: Any, where: str) -> Tool:
    function = definition.get("function") if isinstance(definition, dict) and definition.get("type") == "function" else None
    if not isinstance(function, dict):
        raise ValueError(f"{where}: expected an object with the type function and a function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{where}.function.name: expected 1 to 64 letters, digits, _, . or -")
    if parameters is not None and not isinstance(parameters, dict):
        raise ValueError(f"{where}.function.parameters: expected a JSON schema")
    return Tool(
        name=name, parameters=parameters or {**ANYTHING, "properties": {}, "additionalProperties": False}, definition=definition
    )


def biases_of(logit_bias: Any) -> dict[int, float]:
    """Returns the biases of a `logit_bias`, by token."""
    if not isinstance(logit_bias, dict) or len(logit_bias) > BIASES:
        raise ValueError(f"logit_bias: expected an object of up to {BIASES} tokens")
    biases = {}
    for token, bias in logit_bias.items():
        if not token.isascii() or not token.isdecimal() or type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError("logit_bias: expected tokens with a number from -100 to 100")
        biases[int(token)] = float(bias)
    return {token: bias for token, bias in biases.items() if bias}
