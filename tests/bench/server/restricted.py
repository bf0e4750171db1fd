"""Compares answers of `cgcompile serve` that a JSON schema restricts with free answers of as many tokens. Uses OpenAI's client.

    python -m tests.bench.server.restricted BUNDLE TOKENIZER [--answers 200] [--clients 4]

Every restricted answer must be valid by `jsonschema`.  20 answers with a schema and 20 without alternate; then the model calls
tools. Prints tokens per second, and the server's CPU time per token, on which other work of the machine has less influence. Needs
`openai`, `jsonschema` and `llguidance`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema

from tests.bench.server.llm import Served

ROUND = 20


def text(longest: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest}


def whole(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def several(items: Any, least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def record(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "person": record(name=text(20), tags=several(text(8), 0, 3), age=whole(0, 120)),
    "order": record(
        id=whole(1, 99999), paid={"type": "boolean"},
        items=several(record(product=text(16), count=whole(1, 20), colour={"enum": ["red", "green", "blue"]}), 1, 3),
    ),
    "recipe": record(title=text(24), steps=several({"$ref": "#/$defs/step"}, 2, 4))
    | {"$defs": {"step": record(text=text(30), minutes=whole(1, 90))}},
    "event": record(
        date={"type": "string", "format": "date"}, place={"anyOf": [text(12), {"type": "null"}]},
        score={"type": "number", "minimum": 0, "maximum": 10}, code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"},
    ),
    "list of words": several(text(10), 3, 6),
}  # fmt: skip

TOOL = {"name": "get_weather", "parameters": record(city=text(20), unit={"enum": ["C", "F"]})}


class Answer(NamedTuple):
    """`valid`: whether the answer fits its schema; `tokens`: its number of tokens."""

    valid: bool
    tokens: int


def ask(served: Served, number: int, count: int | None) -> Answer:
    """Requests an answer: with a schema if `count` is None, else a free one of `count` tokens."""
    name = list(SCHEMAS)[number % len(SCHEMAS)]
    messages: list[Any] = [{"role": "user", "content": f"Write one {name} as JSON, number {number}."}]
    options: dict[str, Any] = {"model": "llm", "messages": messages, "temperature": 0.8, "seed": number}
    if count is None:
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMAS[name]}}
        options |= {"response_format": form, "max_tokens": 400}
    else:
        options |= {"max_tokens": count, "extra_body": {"ignore_eos": True}}
    completion = served.client.chat.completions.create(**options)
    try:
        checker = jsonschema.FormatChecker()
        jsonschema.validate(json.loads(completion.choices[0].message.content), SCHEMAS[name], format_checker=checker)
    except (ValueError, jsonschema.ValidationError):
        return Answer(False, completion.usage.completion_tokens)
    return Answer(completion.choices[0].finish_reason == "stop", completion.usage.completion_tokens)


def processor_seconds(served: Served) -> float:
    """Returns the CPU seconds of the server's process."""
    fields = Path(f"/proc/{served.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def calls(served: Served, choice: Any) -> list[Any]:
    """Returns the tool calls in an answer; checks that they are valid."""
    completion = served.client.chat.completions.create(
        model="llm", messages=[{"role": "user", "content": "What is the weather in Paris?"}], temperature=0, max_tokens=120,
        tools=[{"type": "function", "function": TOOL}], tool_choice=choice,
    )  # fmt: skip
    function_calls = completion.choices[0].message.tool_calls or []
    for call in function_calls:
        jsonschema.validate(json.loads(call.function.arguments), TOOL["parameters"])
    return [(call.function.name, call.function.arguments) for call in function_calls]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("tokenizer")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--clients", type=int, default=4)
    args = parser.parse_args()
    served = Served(args.bundle, args.tokenizer)
    ask(served, 0, None)
    valid = 0
    tokens, seconds, processor = {True: 0, False: 0}, {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    with ThreadPoolExecutor(args.clients) as threads:
        for first in range(0, args.answers, ROUND):
            numbers = range(first, min(args.answers, first + ROUND))
            counts: list[int | None] = [None] * len(numbers)
            for restricted in (True, False):
                began, used = time.perf_counter(), processor_seconds(served)
                answers = list(threads.map(lambda number, count: ask(served, number, count), numbers, counts))
                seconds[restricted] += time.perf_counter() - began
                processor[restricted] += processor_seconds(served) - used
                tokens[restricted] += sum(answer.tokens for answer in answers)
                if restricted:
                    valid += sum(answer.valid for answer in answers)
                    counts = [answer.tokens for answer in answers]
    speeds = [tokens[restricted] / seconds[restricted] for restricted in (True, False)]
    costs = [1000 * processor[restricted] / tokens[restricted] for restricted in (True, False)]
    print(f"{valid} of {args.answers} answers are valid; tokens/s with schemas {speeds[0]:.1f}, free {speeds[1]:.1f}", flush=True)
    print(f"processor time for a token: with schemas {costs[0]:.2f} ms, free {costs[1]:.2f} ms", flush=True)
    for choice in ("required", {"type": "function", "function": {"name": TOOL["name"]}}, "auto"):
        print(f"tool_choice {json.dumps(choice)}: {calls(served, choice)}", flush=True)
    served.process.terminate()
    served.process.wait()
    if valid != args.answers or speeds[0] < 0.9 * speeds[1]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
