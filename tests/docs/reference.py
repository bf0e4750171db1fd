"""Writes the pages of cli/docs/reference from the code. Does not import torch."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import typer

import cgbundle
import cgbundle.errors
import cgcompile
import cgcompile.errors
from cgcompile.util.explanations import Explanation, explanations
from cgcompile.util.padding_reasons import ALWAYS, HEADLINE, REASONS
from cgcompile_cli.commands.explain import about
from cgcompile_cli.errors import CATALOGUE
from cgcompile_cli.main import app
from tests.docs.pages import USERS

FOLDER = USERS / "reference"

COMPILER = {name: getattr(cgcompile, name) for name in sorted(cgcompile.__all__) if not name.startswith("_")}
"""Public names of `cgcompile`, with its errors."""


def written() -> dict[str, str]:
    """Returns every page of the reference by its file name."""
    return {
        "commands.md": commands(),
        "cgcompile.md": python("cgcompile", cgcompile.__doc__, COMPILER),
        "cgbundle.md": python("cgbundle", cgbundle.__doc__, runtime()),
        "findings.md": findings(),
        "errors.md": errors(),
        "padding.md": padding(),
    }


def runtime() -> dict[str, Any]:
    """Returns the public names of `cgbundle`, with its errors."""
    return {name: getattr(cgbundle, name) for name in sorted(cgbundle.__all__)}


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, cgbundle.errors.CgbundleError)


def _page(title: str, opening: str, parts: Iterator[str]) -> str:
    note = "<!-- written by `make docs`: change the code, not this page -->"
    return "\n\n".join([f"# {title}", note, opening, *parts]).rstrip() + "\n"


# --- Python -------------------------------------------------------------------------------------------------------


def python(package: str, doc: str | None, names: Mapping[str, Any]) -> str:
    """Returns the reference page of a package: functions and classes first, then errors."""
    opening = _prose(doc or "")
    ordered = sorted(names.items(), key=lambda pair: (_is_error(pair[1]), not callable(pair[1]) or isinstance(pair[1], type)))
    return _page(f"import {package}", opening, (part for name, value in ordered for part in _member(package, name, value)))


def _member(package: str, name: str, value: Any) -> Iterator[str]:
    if isinstance(value, type):
        yield f"## {name}"
        yield from _class(name, value)
    elif inspect.isfunction(value):
        yield f"## {name}"
        yield _code(signature(name, value))
        yield _prose(inspect.getdoc(value) or "")
        yield from _aliases(value)
    else:
        yield f"## {name}"
        yield _code(f"{package}.{name}: {_annotation(value)}")


def _aliases(function: Any) -> Iterator[str]:
    """Yields the type aliases of a signature that users cannot import: those of its module, and of project modules that it
    imports."""
    named = {
        word
        for parameter in inspect.signature(function).parameters.values()
        for word in re.findall(r"\w+", str(parameter.annotation))
    }
    lines = []
    for module in [sys.modules[function.__module__], *_below(function.__module__)]:
        for statement, said in pairwise(ast.parse(inspect.getsource(module)).body):
            target = getattr(statement, "target", None) or next(iter(getattr(statement, "targets", ())), None)
            if isinstance(target, ast.Name) and target.id in named and isinstance(said, ast.Expr):
                doc = inspect.cleandoc(ast.literal_eval(said.value)).replace("\n", " ")
                lines.append(f"- `{target.id}`: {_escaped(doc)}")
    yield from ["\n".join(sorted(set(lines)))] if lines else []


def _below(name: str) -> list[Any]:
    """Returns the project modules from which a module imports names, including those for annotations only. Imports inside functions
    are skipped; they may import torch."""
    body = ast.parse(inspect.getsource(sys.modules[name])).body
    body += [inner for node in body if isinstance(node, ast.If) for inner in node.body]
    imports = [node for node in body if isinstance(node, ast.ImportFrom) and node.level]
    paths = [importlib.util.resolve_name("." * node.level + (node.module or ""), name.rpartition(".")[0]) for node in imports]
    return [importlib.import_module(path) for path in dict.fromkeys(paths)]


def _class(name: str, value: type) -> Iterator[str]:
    bases = [base.__name__ for base in value.__bases__ if base is not object]
    yield _code(f"class {name}({', '.join(bases)})" if bases else f"class {name}")
    yield _prose(inspect.getdoc(value) or "")
    if dataclasses.is_dataclass(value):
        yield "\n".join(f"- `{field.name}: {_annotation(field.type)}`" for field in dataclasses.fields(value))
    if _is_error(value) and value is not cgbundle.errors.CgbundleError:
        return  # the page shows them with the base class
    for member, attribute in members(value).items():
        if isinstance(attribute, property):
            yield f"### {name}.{member}"
            returned = inspect.signature(attribute.fget).return_annotation if attribute.fget else "Any"
            yield _code(f"{member}: {_annotation(returned)}")
            yield _prose(inspect.getdoc(attribute) or "")
        else:
            yield f"### {name}.{member}"
            yield _code(signature(member, inspect.unwrap(getattr(attribute, "__func__", attribute))))
            yield _prose(inspect.getdoc(attribute) or "")


SPECIAL = ("__call__", "__getitem__", "__setitem__")
"""Operator methods that are public."""


def members(value: type) -> dict[str, Any]:
    """Returns the public methods and properties that a class defines or inherits from a class of the project. They are in the order
    of their definition, special methods first."""
    attributes = {
        member: attr
        for base in reversed(value.__mro__)
        if base.__module__.startswith(("cgbundle", "cgcompile"))
        for member, attr in vars(base).items()
        if (member in SPECIAL or not member.startswith("_")) and (callable(attr) or isinstance(attr, property | classmethod))
    }
    return dict(sorted(attributes.items(), key=lambda pair: pair[0] not in SPECIAL))


def signature(name: str, function: Any) -> str:
    """Returns `build(model, inputs=None, *, ...) -> Built`, with a line per parameter if it is long."""
    sig = inspect.signature(function)
    params = [parameter for parameter in sig.parameters.values() if parameter.name != "self"]
    shown: list[str] = []
    for place, param in enumerate(params):
        if param.kind is param.KEYWORD_ONLY and not any(e.kind in (e.KEYWORD_ONLY, e.VAR_POSITIONAL) for e in params[:place]):
            shown.append("*")
        stars = {param.VAR_POSITIONAL: "*", param.VAR_KEYWORD: "**"}.get(param.kind, "")
        kind = "" if param.annotation is param.empty else f": {_annotation(param.annotation)}"
        default = "" if param.default is param.empty else f" = {param.default!r}" if kind else f"={param.default!r}"
        shown.append(f"{stars}{param.name}{kind}{default}")
    returned = "" if sig.return_annotation is sig.empty else f" -> {_annotation(sig.return_annotation)}"
    line = f"{name}({', '.join(shown)}){returned}"
    if len(line) <= 110:
        return line
    return "\n".join([f"{name}(", *[f"    {part}," for part in shown], f"){returned}"])


def _annotation(value: Any) -> str:
    if isinstance(value, str):
        return value
    return value.__name__ if isinstance(value, type) else re.sub(r"\b\w+\.(?=\w)", "", str(value))


def _code(text: str) -> str:
    return f"```python signature\n{text}\n```"


def _prose(doc: str) -> str:
    """Converts a docstring to Markdown; indented paragraphs become code."""
    paragraphs: list[str] = []
    for paragraph in inspect.cleandoc(doc).split("\n\n"):
        if all(line.startswith("    ") for line in paragraph.splitlines() if line):
            paragraphs.append(f"```\n{textwrap.dedent(paragraph)}\n```" if paragraph.strip() else "")  # ruff would format Python
        else:
            paragraphs.append(_escaped(paragraph))
    return "\n\n".join(part for part in paragraphs if part)


def _escaped(text: str) -> str:
    """Escapes Markdown characters outside of `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<])", r"\\\1", part) for part in parts)


# --- commands -----------------------------------------------------------------------------------------------------


def commands() -> str:
    """Returns the reference page of the command line."""
    group: Any = typer.main.get_command(app)
    opening = _prose(_help(group))
    every = "Every command has `--help`. `--name / -n` are two spellings of one option."
    return _page("Commands", f"{opening}\n\n{every}", (part for name, command in _tree(group) for part in _command(name, command)))


def _tree(group: Any, before: str = "cgcompile") -> Iterator[tuple[str, Any]]:
    """Yields every command by its full name, including those of groups."""
    context = group.context_class(group, info_name=before)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if hasattr(command, "list_commands"):
            yield from _tree(command, f"{before} {name}")
        elif not command.hidden:
            yield f"{before} {name}", command


def _help(command: Any) -> str:
    return (command.help or "").replace("\f", "")


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"## {name}"
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    yield _code_plain(" ".join([name, *[_argument(argument) for argument in arguments], "[OPTIONS]"]))
    text, _, example = _help(command).partition("\b\n")  # Typer does not rewrap the text after this mark
    yield _prose(text)
    if example.strip():
        yield _code_plain(textwrap.dedent(example.strip("\n")).strip())
    rows = [(f"`{_argument(argument)}`", argument.help or "", _default(argument)) for argument in arguments]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option" and not parameter.hidden]
    rows += [(_option(option), option.help or "", _default(option)) for option in options]
    yield "\n".join(["| | | default |", "|---|---|---|", *[f"| {a} | {_escaped(b)} | {c} |" for a, b, c in rows]])


def _argument(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _option(option: Any) -> str:
    """`--target TARGET`, `--lower eager\\|inductor`."""
    kind = "" if option.is_flag else f" {option.metavar or '|'.join(_choices(option)) or option.name.upper()}"
    more = " (repeatable)" if option.multiple else ""
    return " / ".join(f"`{name}{kind}`".replace("|", "\\|") for name in [*option.opts, *option.secondary_opts]) + more


def _choices(option: Any) -> tuple[str, ...]:
    """Returns the choices of a Literal option. Typer has stored them in two ways since 0.26."""
    kind = getattr(option, "type", None)
    return tuple(kind.choices) if hasattr(kind, "choices") else typing.get_args(option.type_descriptor.annotation)


def _default(parameter: Any) -> str:
    default_value = parameter.default() if callable(parameter.default) else parameter.default
    return "" if default_value in (None, False, (), [], "") or parameter.required else f"`{default_value}`"


def _code_plain(text: str) -> str:
    return f"```\n{text}\n```"


# --- findings and errors ------------------------------------------------------------------------------------------

FIELDS = {"what": "Looks for", "why": "Why", "effect": "Effect", "fix": "What to do", "source": "Source"}


def findings() -> str:
    """Returns the page of all rules."""
    known = [explanation for explanation in explanations() if explanation.kind == "finding"]
    opening = (
        "`cgcompile check` and `build` report these findings; `cgcompile explain NAME` shows the same text. Severity `refuse` "
        "stops a build, `host` runs operations on the CPU between two graphs, `note` is for information."
    )
    return _page("Findings", opening, (part for explanation in known for part in _finding(explanation)))


def _finding(explanation: Explanation) -> Iterator[str]:
    yield f"## {explanation.name}"
    yield f"{about(explanation)[0].upper()}{about(explanation)[1:]}. {_escaped(explanation.headline)}"
    yield "\n".join(f"- **{FIELDS[label]}**: {_escaped(said)}" for label, said in explanation.fields)


TITLES = {
    "cgbundle": "When a bundle is loaded and called",
    "cgcompile": "When a model is built",
    "cgcompile_cli": "On the command line",
}


def errors() -> str:
    """Returns the page of all error codes."""
    known = [explanation for explanation in explanations({"cgcompile_cli": CATALOGUE}) if explanation.kind == "error"]
    opening = (
        "An error is one line with the cause, the place, what was expected and what was given. A `hint:` line says what to do. "
        "In Python these are `error.code`, `error.where` and `error.hint`, and `--json` prints them too. This page has the general "
        "hints; an error may have a more specific one. `cgcompile explain CODE` shows the same text."
    )
    return _page("Errors", opening, (part for package in TITLES for part in _catalogue(package, known)))


def _catalogue(package: str, known: list[Explanation]) -> Iterator[str]:
    yield f"## {TITLES[package]}"
    rows = [row for row in known if row.package == package]
    yield "\n".join([
        "| code | raised as, exit status | cause | what to do |", "|---|---|---|---|",
        *[f"| `{row.name}` | {row.error}, {row.exit_code} | {_cell(row.headline)} | {_cell(dict(row.fields)['fix'])} |"
          for row in rows],
    ])  # fmt: skip


# --- padding ------------------------------------------------------------------------------------------------------


def padding() -> str:
    """Returns the page of all reasons not to pad."""
    opening = f"{HEADLINE} `cgcompile explain padding` shows the same.\n\n{ALWAYS[0].upper()}{ALWAYS[1:]}:"
    rows = "\n".join([f"| {_cell(reason.printed)} | {_cell(reason.meaning)} | {_cell(reason.cure)} |" for reason in REASONS])
    return _page("Padding", opening, iter([f"| reason | what it means | what to do |\n|---|---|---|\n{rows}"]))


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|")
