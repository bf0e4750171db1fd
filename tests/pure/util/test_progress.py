"""What a build reports about its stages."""

from __future__ import annotations

from cgcompile.util.progress import named_tells


def test_of_several_entries_each_line_names_its_own_and_how_many_there_are() -> None:
    lines: list[str] = []
    for tell in named_tells(lines.append, ["prefill", "decode"]):
        tell("compiling C++, 1 of 2 files")
    assert lines == [
        "entry prefill (1 of 2): compiling C++, 1 of 2 files", "entry decode (2 of 2): compiling C++, 1 of 2 files",
    ]  # fmt: skip


def test_a_single_entry_is_not_named_in_lines() -> None:
    lines: list[str] = []
    (tell,) = named_tells(lines.append, ["forward"])
    tell("compiling")
    assert lines == ["compiling"]
