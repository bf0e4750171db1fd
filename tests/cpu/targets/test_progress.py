"""What a build for the CPU reports while it compiles."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgcompile.targets.cpu.aoti import Compiled
from cgcompile.targets.cpu.build import _CompiledEntry, _summary


def entry(name: str, keys: list[tuple[int, ...]]) -> Any:
    programs: Any = SimpleNamespace(distinct=[(key, None) for key in keys])
    spec: Any = SimpleNamespace(name=name)
    return _CompiledEntry(entry=spec, programs=programs, compiled={})


@pytest.mark.parametrize(
    ("name", "keys", "texts"),
    [
        ("forward", [(1, 16)], ["0 of 2"]),
        ("forward", [(1, 16), (8, 16)], ["model-1x16: 0 of 2", "model-8x16: 0 of 2"]),
        ("decode", [(1,), (8,)], ["decode-1: 0 of 2", "decode-8: 0 of 2"]),
    ],
)
def test_programs_that_are_compiled_side_by_side_are_named(name: str, keys: list[tuple[int, ...]], texts: list[str]) -> None:
    """Without names, `2 of 2` of one program is followed by `0 of 2` of another."""
    unit, lines = entry(name, keys), list[str]()
    for key in keys:
        unit.named(key, lines.append)("0 of 2")
    assert lines == texts


@pytest.mark.parametrize(
    ("cached", "text"),
    [
        ([True], "a0.so, 3 B, from the cache"), ([False, True, False], "3 shared objects, 9 B, 1 of them from the cache"),
        ([True, True], "2 shared objects, 6 B, all from the cache"), ([False, False], "2 shared objects, 6 B"),
    ],
)  # fmt: skip
def test_the_summary_counts_what_the_cache_had(tmp_path: Path, cached: list[bool], text: str) -> None:
    path = tmp_path / "code.so"
    path.write_bytes(b"abc")
    rows = [
        (f"a{number}.so", Compiled(path=path, features=(), standalone=True, recalled=recalled))
        for number, recalled in enumerate(cached)
    ]
    assert _summary(rows) == text
