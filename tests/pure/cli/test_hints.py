"""Every option that a message of the compiler or of the commands names exists."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest
from typer.main import get_command

from cgcompile.util.explanations import explanations
from cgcompile_cli.main import app
from tests.helpers.places import ROOT

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
OTHERS = {"--strip-all", "--remove-section", "--no-deps", "--version", "--help"}
"""Options of other programs, and Typer's own."""


def spelled() -> list[tuple[str, str]]:
    """Returns (file:line, option) for every option in a string. Docstrings and arguments of processes do not count."""
    options = []
    for folder in ("cgcompile", "cli/cgcompile_cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                    at = f"{path.relative_to(ROOT)}:{node.lineno}"
                    options += [(at, option) for option in OPTION.findall(node.value)]
    return options


def known() -> set[str]:
    commands, options = [get_command(app)], set()
    for command in commands:  # the commands of groups are added in the loop
        commands += getattr(command, "commands", {}).values()
        options |= {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return options


def test_options_that_messages_name_exist() -> None:
    named = spelled()
    assert len(named) > 30
    assert [row for row in named if row[1] not in known() | OTHERS] == []


TREE = re.compile(r"(?<![\w/.])(?:cli|bundles|examples|tests)/[\w/]+\.(?:md|py)|\b[A-Z]+\.md\b")
"""A path of the source tree, which users of a wheel do not have."""


def test_nothing_that_is_printed_names_a_path_of_the_source_tree() -> None:
    printed = [str(explanation) for explanation in explanations()]
    commands = [get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        printed += [command.help or "", *[getattr(parameter, "help", None) or "" for parameter in command.params]]
    for folder in ("cgcompile", "cli/cgcompile_cli", "bundles/cgbundle"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_bytes())
            docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs]
            printed += [node.value for node in strings if isinstance(node.value, str) and " " in node.value]
    assert TREE.search("see cli/docs/calls.md") and TREE.search("bundles/FORMAT.md lists") and len(printed) > 1000
    assert [text for text in printed if TREE.search(text)] == []


@pytest.mark.parametrize("option", ["--fallback-op", "--lower", "--max-keys", "--force", "--allow", "--record"])
def test_a_build_takes_what_its_hints_name(option: str) -> None:
    build = get_command(app).commands["build"]  # type: ignore[attr-defined]
    assert option in {opt for parameter in build.params for opt in parameter.opts}


def test_what_is_to_be_installed_is_what_the_package_asks_for() -> None:
    """Packages in hints are an extra of cgcompile, or packages of its extras with the versions in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {requirement for extra in extras.values() for requirement in extra} | {f"cgcompile[{name}]" for name in extras}
    lines = [
        node.value
        for folder in ("cgcompile", "cli/cgcompile_cli", "bundles/cgbundle")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("pip install '")
    ]
    named = {requirement for line in lines for requirement in re.findall(r"'([^']+)'", line)}
    assert {"cuda-bindings>=13", "cryptography>=43"} <= named <= wanted
