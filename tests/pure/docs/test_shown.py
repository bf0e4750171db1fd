"""Compares the output that a page shows with what its command printed."""

from __future__ import annotations

import pytest

from tests.docs.console import as_check, check_options, commands, is_simple, words
from tests.docs.pages import blocks
from tests.docs.shown import difference


@pytest.mark.parametrize(
    ("shown", "got"),
    [
        ("a\nb", "a\nb\n"),
        ("export   0.51 s  13 nodes", "export  12.5 ms  13 nodes"),
        ("lower 28.2 s, 294 KB", "lower 1 min 28 s, 1.2 MB"),
        ("built x (5 files, 448.4 KiB) in 1 min 05 s", "built x (5 files, 2.0 MiB) in 40.4 s"),
        ("error 1.6e-07, allowed 1.0e-04", "error 0.0e+00, allowed 1.0e-04"),
        ("ratio 1.00  x 0.5", "ratio 9.3  x 1.25"),
        ("target cpu ...", "target cpu x86_64 (avx)"),
        ("...\nb\n...\nd", "a\nb\nc\nc\nd"),
        ("a\n...", "a"),
        ("...", ""),
        ("[...]", "[1, 2]"),
        ("  a", "      a"),
    ],
)
def test_shown_and_printed_agree(shown: str, got: str) -> None:
    assert difference(shown, got) == ""


@pytest.mark.parametrize(
    ("shown", "got", "missing"),
    [
        ("a\nb", "a\nc", "b"),
        ("4 int_keys in 0.5 s", "3 int_keys in 0.5 s", "4 int_keys in 0.5 s"),
        ("a", "a\nb", "nothing more than was shown, got: b"),
        ("...\nb", "b\nc", "b (together, at this place)"),
        ("a\n...\nb\nc", "a\nb\nx\nc", "b / c (together, at this place)"),
        ("sm_90", "sm_80", "sm_90"),
        ("(1, 4)", "(1, 5)", "(1, 4)"),
        ("0.5 s", "0.5 MB", "0.5 s"),
    ],
)
def test_what_differs_is_named(shown: str, got: str, missing: str) -> None:
    assert difference(shown, got) == missing


def test_blocks_are_found_with_their_words_and_lines() -> None:
    code_blocks = list(blocks("a\n```python static\nx\n```\n````text\n```\ny\n````\n"))
    assert [(block.language, block.words, block.text, block.line) for block in code_blocks] == [
        ("python", ("static",), "x\n", 3),
        ("text", (), "```\ny\n", 6),
    ]


def test_commands_are_split_from_what_they_print() -> None:
    assert [(command.line, command.shown) for command in commands("$ a\nb\n\nc\n$ d\n")] == [("a", "b\n\nc"), ("d", "")]
    assert words("A_B=1 cgcompile build 'x y'  # z") == ({"A_B": "1"}, ["cgcompile", "build", "x y"])
    assert is_simple("cgcompile sizes x --max 3") and not is_simple("cgcompile sizes x | head") and not is_simple("ls")


def test_options_that_do_not_exist_are_named() -> None:
    check_options(["build", "m.py", "--sizes", "1,8", "--target", "sm_90"])
    for wrong in (["build", "m.py", "--size", "1"], ["built"], ["build", "m.py", "--lower", "fast"], ["build"]):
        with pytest.raises(AssertionError):
            check_options(wrong)


def test_a_build_becomes_a_check_of_the_same_model() -> None:
    build = ["build", "m.py", "--sizes", "a=1", "--sizes", "b=2", "--target", "cpu", "-q", "-o", "x", "--fallback-op", "f"]
    assert as_check(build) == ["check", "m.py", "--sizes", "a=1", "--sizes", "b=2", "--fallback-op", "f", "--target", "cuda"]
