"""A process for one piece of work: its answer, its refusal by name, and its death each come back as themselves."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from cgcompile.errors import CATALOGUE
from cgcompile.util.workers import ask
from tests.helpers.raising import raises

CHILD = """
    import sys
    from cgcompile.errors import sizes-invalid
    from cgcompile.trace.children import answer
    from cgcompile.trace.errors import function-not-interpretable

    class Unlisted(function-not-interpretable):
        pass

    def work(request):
        if request == "refuse":
            raise function-not-interpretable("no erfc", "use erf")
        if request == "refuse plainly":
            raise sizes-invalid("0 is no size")
        if request == "refuse oddly":
            raise Unlisted("who knows", "ask")
        if request == "die":
            raise RuntimeError("out of luck")
        return {"twice": 2 * request}

    if __name__ == "__main__":
        sys.exit(answer(sys.argv[1], work))
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "asked_child.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return "asked_child"


def test_an_answer(child: str, tmp_path: Path) -> None:
    assert ask(child, 21, tmp_path / "work-1x8", {}, "worker-died", "doubling 21") == {"twice": 42}


@pytest.mark.parametrize(
    ("request_", "error", "message", "hint"),
    [
        ("refuse", "function-not-interpretable", "no erfc", "use erf"),
        ("refuse plainly", "sizes-invalid", "0 is no size", CATALOGUE["sizes-invalid"].hint),
    ],
)
def test_a_refusal_keeps_its_class_and_hint(
    request_: str, error: type[Exception], message: str, hint: str, child: str, tmp_path: Path
) -> None:
    with raises(error, match=message) as caught:
        ask(child, request_, tmp_path / "work", {}, "worker-died", "it")
    assert type(caught.value) is error and caught.value.hint == hint


@pytest.mark.parametrize(("request_", "message"), [("refuse oddly", "who knows"), ("die", "doing it: .* status 1: .*out of luck")])
def test_whatever_else_ends_it_is_its_death(request_: str, message: str, child: str, tmp_path: Path) -> None:
    with raises("worker-died", match=message):
        ask(child, request_, tmp_path / "work", {}, "worker-died", "doing it")
