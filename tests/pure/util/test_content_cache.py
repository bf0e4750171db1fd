"""Results cached by content: a lookup gives the complete result or none, and the name depends on all inputs of the result."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgcompile.util import content_cache
from cgcompile.util.content_cache import MAGIC, cache_folder, cache_path, digest, recall, remember, settings, sources
from tests.helpers.raising import raises

PARTS = st.lists(st.one_of(st.binary(max_size=8), st.text(max_size=8), st.integers()), max_size=4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    number: int
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherResult:
    number: int
    data: bytes


RESULT = Result(number=7, data=b"some \x00 bytes")


def kept(folder: Path) -> Path:
    """Writes a result to the cache, and returns its path."""
    path = folder / "stage" / digest("a")
    remember(path, RESULT)
    return path


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "some" / "folder" / digest("a")
    assert recall(path, Result) is None
    remember(path, RESULT)
    assert recall(path, Result) == RESULT and recall(path, OtherResult) is None
    remember(path, Result(number=8, data=b""))
    assert recall(path, Result) == Result(number=8, data=b"") and names(path.parent) == [path.name]


def test_files_are_the_users_own(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = kept(tmp_path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


@given(st.data())
def test_a_damaged_file_counts_as_missing(tmp_path_factory, data: st.DataObject) -> None:
    path = kept(tmp_path_factory.mktemp("kept"))
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    assert recall(path, Result) is None
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert recall(path, Result) is None


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (77,)


def in_its_place(path: Path, what: str) -> None:
    """Replaces an entry by something else."""
    whole, mode = path.read_bytes(), path.stat().st_mode
    path.unlink()
    if what == "a folder":
        path.mkdir()
        (path / "file").touch()
    elif what == "a pipe":
        os.mkfifo(path)
    elif what == "a link":
        path.with_name("elsewhere").write_bytes(whole)
        path.symlink_to("elsewhere")
    elif what == "a sparse file":
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    elif what == "a pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        body = {"garbage": os.urandom(99), "a pickle with a right hash": pickle.dumps(Bomb()), "depth": b"[" * 100_000}[what]
        body = len(body).to_bytes(8, "little") + body if what == "depth" else body
        path.write_bytes(MAGIC + content_cache._head(path, body) + body)
    if path.is_file() and not path.is_symlink():
        path.chmod(mode)


ODD = [
    "a folder", "a pipe", "a link", "a sparse file", "a pickle", "garbage", "a pickle with a right hash", "depth",
]  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_anything_else_of_that_name_counts_as_missing_and_is_replaced(tmp_path: Path, what: str) -> None:
    """Such a file is not executed, waited for, or read into memory completely."""
    path = kept(tmp_path)
    in_its_place(path, what)
    assert recall(path, Result) is None
    remember(path, RESULT)
    assert recall(path, Result) == RESULT


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_counts_as_missing(tmp_path: Path, mode: int) -> None:
    path = kept(tmp_path)
    path.chmod(mode)
    assert recall(path, Result) is None
    remember(path, RESULT)
    assert recall(path, Result) == RESULT and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_counts_as_missing(tmp_path: Path) -> None:
    path = kept(tmp_path)
    os.chown(path, 12345, -1)
    assert recall(path, Result) is None
    os.chown(path.parent, 12345, -1)
    with raises("cache-unsafe"):
        recall(path, Result)


def test_a_file_that_got_anothers_name_counts_as_missing(tmp_path: Path) -> None:
    path = kept(tmp_path)
    assert recall(path.rename(path.with_name(digest("b"))), Result) is None


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file"])
def test_a_folder_that_is_not_the_users_own_is_refused(tmp_path: Path, kind: str) -> None:
    path = kept(tmp_path)
    if kind == "open to others":
        path.parent.chmod(0o770)
    else:
        path.parent.rename(tmp_path / "elsewhere")
        path.parent.symlink_to("elsewhere") if kind == "a link" else path.parent.touch()
    with raises("cache-unsafe", match="stage"):
        recall(path, Result)
    with raises("cache-unsafe" if kind != "a file" else "cache-unwritable", match="stage"):
        remember(path, RESULT)


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "file" / "cache"))
    with raises("cache-unwritable", match="file/cache"):
        cache_folder()


def test_the_users_own_link_to_the_cache_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far").mkdir(mode=0o700)
    (tmp_path / "near").symlink_to("far")
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "near"))
    assert cache_folder() == tmp_path / "far"


# --- names -------------------------------------------------------------------------------------------------------


@given(PARTS, PARTS)
def test_other_parts_have_another_name(one: list[object], other: list[object]) -> None:
    assert (digest(*one) == digest(*other)) == ([(type(x), x) for x in one] == [(type(x), x) for x in other])


def test_parts_do_not_run_into_each_other() -> None:
    assert len({digest(b"ab", b"c"), digest(b"a", b"bc"), digest(b"abc"), digest(b"abc", b"")}) == 4
    assert len({digest("1"), digest(1), digest(b"1"), digest(b"'1'")}) == 4


def test_the_code_that_made_a_result_is_part_of_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    (folder / "lockstep").mkdir(parents=True)
    seen = [sources((tmp_path,))]
    for path in (folder / "a.py", folder / "lockstep" / "b.py", tmp_path / "lower.py", tmp_path / "arch.py"):
        for text in ("1", "2"):
            path.write_text(text)
            seen.append(sources((tmp_path,)))
    (folder / "a.py").rename(folder / "c.py")
    seen.append(sources((tmp_path,)))
    assert len(set(seen)) == len(seen) and sources((tmp_path,)) == seen[-1]
    (folder / "notes.txt").write_text("no code")
    assert sources((tmp_path,)) == seen[-1]


@pytest.mark.parametrize("stage", ["lowered", "kernels", "interpreted"])
def test_all_that_changes_results_is_part_of_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    def name() -> str:
        return cache_path(tmp_path, stage, "part").name

    seen = [name()]
    for variable in ("TORCHINDUCTOR_MAX_AUTOTUNE", "TRITON_F32_DEFAULT", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        for value in ("0", "1"):
            monkeypatch.setenv(variable, value)
            seen.append(name())
    monkeypatch.setattr(content_cache, "_sources", lambda: "other code")
    seen.append(name())
    for package in content_cache.LIBRARIES:
        monkeypatch.setattr(content_cache, "_version", lambda asked, package=package: f"{asked} {asked == package}")
        seen.append(name())
    monkeypatch.setattr(content_cache.sys, "version", "4.0")
    seen.append(name())
    assert len(set(seen)) == len(seen)
    assert name() == seen[-1]


def test_where_others_keep_their_files_is_no_part_of_a_name() -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": "/a", "TRITON_CACHE_DIR": "/b", "CUDA_CACHE_PATH": "/c", "HOME": "/d", "TRITON_DEBUG": "1"}
    assert settings(env) == [("TRITON_DEBUG", "1")]
