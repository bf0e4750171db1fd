"""Predefined macros of the C++ compiler: queried once, cached between builds, and queried again if they may have changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cgcompile.targets.cpu.compiler import ask_compilers
from cgcompile.targets.instruction_sets import level_of, macros

COMPILER = """#!/bin/sh
case "$*" in *-dM*) echo "$*" >> {log} ;; esac
exec g++ {options} "$@"
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Returns a function that gives the queries to CXX, a fake compiler, since its last call."""
    log = tmp_path / "log"
    write(tmp_path, "")
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "cache"))

    def read() -> list[str]:
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    return read


def write(folder: Path, options: str) -> None:
    (folder / "g++").write_text(COMPILER.format(log=folder / "log", options=options))
    (folder / "g++").chmod(0o700)


def test_a_question_is_asked_once_and_the_next_build_knows_the_answer(tmp_path: Path, asked: Callable[[], list[str]]) -> None:
    path = str(tmp_path / "g++")
    first = ask_compilers(path, None)
    plain, wide = first.plain(), first.plain("-O2", "-ffast-math")
    assert (plain, wide) == (macros(path), macros(path, "-O2", "-ffast-math")) and "__FAST_MATH__" in wide
    assert first.plain() == plain and len(asked()) == 4, "two of them were the test's own"
    later = ask_compilers(path, None)
    assert later.plain("-O2", "-ffast-math") == wide and asked() == []
    later.wrapped("-O2", "-ffast-math")
    assert len(asked()) == 1, "what Inductor is given may answer otherwise"
    ask_compilers(path, level_of("x86-64-v3")).wrapped("-O2", "-ffast-math")
    assert len(asked()) == 1, "and for each level"


def test_another_compiler_is_asked_again(tmp_path: Path, asked: Callable[[], list[str]]) -> None:
    path = str(tmp_path / "g++")
    assert "NEW" not in ask_compilers(path, None).plain()
    asked()
    write(tmp_path, "-DNEW -O1")
    assert "NEW" in ask_compilers(path, None).plain() and len(asked()) == 1


def test_without_a_place_to_keep_them_they_are_asked(
    tmp_path: Path, asked: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        assert ask_compilers(str(tmp_path / "g++"), None).plain()["__cplusplus"]
    assert len(asked()) == 2
