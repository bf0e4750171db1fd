"""Compiler caches that later builds use again."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cgcompile.capture.compile_cache import keep_compiled, program_hash, recall_compiled  # noqa: E402
from cgcompile.export.programs import Programs  # noqa: E402


def program(seed: int, width: int = 4) -> Programs:
    torch.manual_seed(seed)
    model = torch.nn.Linear(width, 2)
    exported = torch.export.export(model, (torch.ones(3, width),))
    return Programs(by_key={(3,): exported}, dynamic=True, reason="")


def test_files_come_back_for_the_int_keys_that_were_lowered(tmp_path: Path) -> None:
    first, second, path = tmp_path / "first", tmp_path / "second", tmp_path / "kept/a"
    (first / "triton/x").mkdir(parents=True)
    (first / "triton/x/k.cubin").write_bytes(b"cubin")
    (first / "link").symlink_to(first / "triton")
    assert recall_compiled(path, second) == frozenset()
    keep_compiled(path, ["(1,)"], first)
    assert recall_compiled(path, second) == {"(1,)"}
    assert [path.relative_to(second).as_posix() for path in second.rglob("*") if path.is_file()] == ["triton/x/k.cubin"]
    (second / "triton/x/k.cubin").write_bytes(b"other")
    keep_compiled(path, ["(8,)", "(1,)"], second)
    assert recall_compiled(path, first) == {"(1,)", "(8,)"}
    assert (first / "triton/x/k.cubin").read_bytes() == b"cubin"  # existing files are kept


def test_without_a_cache_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    keep_compiled(None, ["(1,)"], tmp_path)
    assert recall_compiled(None, tmp_path) == frozenset()


def test_a_programs_hash_covers_its_code_and_not_its_weights() -> None:
    hashes = [program_hash(program(seed, width), []) for seed, width in ((0, 4), (1, 4), (0, 5))]
    assert hashes[0] == hashes[1] != hashes[2]
    assert program_hash(program(0), [["add"]]) != hashes[0]
