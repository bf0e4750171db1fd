"""The options of a build are one record: Python, the command line and the manifest have the same names and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest

import cgcompile
from cgcompile.targets.choice import Options
from cgcompile_cli.commands import build, check

DEFAULTS = {field.name: field.default if field.default is not MISSING else {} for field in fields(Options)}

ARGUMENTS = frozenset({"model", "inputs"})

OF_THE_COMMAND_LINE = frozenset({"model", "quiet", "verbose", "as_json"})

OF_PYTHON = frozenset({"donations", "state", "progress"})
"""Options without a word on the command line: a model file has functions instead."""


def defaults(function: Callable[..., Any], without: frozenset[str]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name not in without}


def alike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether defaults are the same.  The command line has None for options without a value; progress is shown in a terminal."""
    return all((ours[name] or None) == (theirs[name] or None) for name in ours if name != "progress")


def test_python_has_the_options_of_the_record() -> None:
    ours = defaults(cgcompile.build, ARGUMENTS)
    assert ours.keys() == DEFAULTS.keys() and alike(ours, DEFAULTS)


def test_a_check_has_a_part_of_them() -> None:
    ours = defaults(cgcompile.check, ARGUMENTS)
    assert ours.keys() < DEFAULTS.keys() and alike(ours, DEFAULTS)


@pytest.mark.parametrize("command", [build.build, check.check])
def test_the_command_line_has_them_all(command: Callable[..., Any]) -> None:
    function = cgcompile.build if command is build.build else cgcompile.check
    ours = {{"recorder": "record"}.get(name, name): value for name, value in defaults(command, OF_THE_COMMAND_LINE).items()}
    assert ours.keys() == defaults(function, ARGUMENTS | OF_PYTHON).keys() and alike(ours, DEFAULTS)


CHANGES: dict[str, Any] = {
    "strict": True, "lower": "eager", "specialize": "shared", "world": 2, "split": "layers", "autotune": True,
    "autotune_timeout": 7.5, "standalone": False, "train": True, "fallback_ops": ("a::b", "c::d"),
}  # fmt: skip


def test_the_manifest_names_the_options_that_were_chosen() -> None:
    plain = {"target": "auto", "lower": "inductor", "specialize": "size", "strict": "false"}
    assert Options().recorded("host") == plain
    interpreted = {"record": "cross-compile", "prove": "interpret", "prove_budget": "120"}
    assert Options().recorded("cross-compile") == plain | interpreted
    assert "prove_budget" not in Options(prove="none").recorded("cross-compile")
    recorded = replace(Options(), **CHANGES).recorded("capture")
    assert recorded == {"target": "auto"} | {
        "strict": "true", "lower": "eager", "specialize": "shared", "world": "2", "split": "layers", "autotune": "true",
        "autotune_timeout": "7.5", "standalone": "false", "train": "true", "fallback_ops": "a::b, c::d",
    }  # fmt: skip
