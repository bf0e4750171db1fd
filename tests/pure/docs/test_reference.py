"""The reference matches the code, and omits nothing public."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import cgbundle
import cgcompile
from tests.docs.reference import COMPILER, FOLDER, members, runtime, written

PAGES = written()


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_what_the_code_says(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name], "run: make docs"


def test_no_other_page_lies_there() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


@pytest.mark.parametrize(
    ("page", "package", "names"), [("cgcompile.md", cgcompile, COMPILER), ("cgbundle.md", cgbundle, runtime())]
)
def test_every_public_name_has_an_entry_that_says_something(page: str, package: Any, names: dict[str, Any]) -> None:
    assert set(package.__all__) - {"__version__"} <= names.keys()
    headings = [line.removeprefix("## ") for line in PAGES[page].splitlines() if line.startswith("## ")]
    assert sorted(headings) == sorted(names)
    for name, value in names.items():
        if isinstance(value, type):
            assert value.__doc__, name
            for member, attribute in members(value).items():
                assert inspect.getdoc(attribute), f"{name}.{member} has no docstring"
        elif inspect.isfunction(value):
            assert value.__doc__, name


@pytest.mark.parametrize(("page", "names"), [("cgcompile.md", COMPILER), ("cgbundle.md", runtime())])
def test_every_parameter_of_a_function_is_documented(page: str, names: dict[str, Any]) -> None:
    """The docstring of the function must name the parameter between backquotes."""
    for name, value in names.items():
        if inspect.isfunction(value) and len(inspect.signature(value).parameters) > 2:
            for parameter in inspect.signature(value).parameters:
                assert f"`{parameter}`" in (value.__doc__ or ""), f"{page}: {name}({parameter})"
