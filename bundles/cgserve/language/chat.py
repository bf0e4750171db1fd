"""Chat templates of the Hub: Jinja that makes a prompt of a conversation, with what transformers adds to the language."""

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
    """`{% generation %}` marks what the assistant said, for training; here it is what stands in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A template; `special` are the names of tokens that it may use (`bos_token`, ...).  It reaches the conversation alone."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        """Raises ValueError where the template is no Jinja."""
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
        """The prompt of a conversation, up to where the assistant answers; `arguments`: more of the template's own.  Raises
        ValueError with what the template says."""
        named = {"add_generation_prompt": True, **arguments, **self._special, "messages": list(messages)}
        try:
            return self._template.render(named)
        except (TemplateError, TypeError) as error:  # a field of a message may be of a type that the template does not expect
            raise ValueError(str(error)) from None


def refuse(text: str) -> None:
    """What templates call to refuse a conversation."""
    raise TemplateError(text)
