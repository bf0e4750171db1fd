"""A process for one piece of work: its answer, its refusal by name, and its death each come back as themselves."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from cgcompile.errors import SizesInvalid
from cgcompile.offline.errors import InterpreterDied, NoStandIn
from cgcompile.util.workers import ask

CHILD = """
    import sys
    from cgcompile.errors import SizesInvalid
    from cgcompile.trace.children import answer
    from cgcompile.trace.errors import NoStandIn

    class Unlisted(NoStandIn):
        pass

    def work(request):
        if request == "refuse":
            raise NoStandIn("no erfc", "use erf")
        if request == "refuse plainly":
            raise SizesInvalid("0 is no size")
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
    assert ask(child, 21, tmp_path / "work-1x8", {}, InterpreterDied, "doubling 21") == {"twice": 42}


@pytest.mark.parametrize(
    ("request_", "error", "message", "hint"),
    [("refuse", NoStandIn, "no erfc", "use erf"), ("refuse plainly", SizesInvalid, "0 is no size", SizesInvalid.hint)],
)
def test_a_refusal_keeps_its_class_and_hint(
    request_: str, error: type[Exception], message: str, hint: str, child: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as caught:
        ask(child, request_, tmp_path / "work", {}, InterpreterDied, "it")
    assert type(caught.value) is error and caught.value.hint == hint


@pytest.mark.parametrize(("request_", "message"), [("refuse oddly", "who knows"), ("die", "doing it: .* status 1: .*out of luck")])
def test_whatever_else_ends_it_is_its_death(request_: str, message: str, child: str, tmp_path: Path) -> None:
    with pytest.raises(InterpreterDied, match=message):
        ask(child, request_, tmp_path / "work", {}, InterpreterDied, "doing it")
