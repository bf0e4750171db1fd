"""Renders chat templates of the Hub: Jinja with the extensions of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; only its contents are rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A chat template in a sandbox.  `special`: special tokens for the template (`bos_token`, ...)."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        """Raises ValueError if the template is not valid Jinja."""
        extensions = ["jinja2.ext.loopcontrols", GenerationBlock]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from None
        self._special = special

    def render(self, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        """Returns the prompt of a conversation, up to the assistant's answer.  `arguments`: further variables of the template.
        Raises ValueError with the template's message."""
        variables = {"add_generation_prompt": True, **arguments, **self._special, "messages": list(messages)}
        try:
            return self._template.render(variables)
        except (TemplateError, TypeError) as error:  # a field of a message may have an unexpected type
            raise ValueError(str(error)) from None


def refuse(text: str) -> None:
    """Raises the error of a template that calls raise_exception."""
    raise TemplateError(text)
