"""Results kept by content: what is asked for comes back whole or not at all, and everything that matters is in the name."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cgcompile.util.content_cache import digest, recall, remember, sources

PARTS = st.lists(st.one_of(st.binary(max_size=8), st.text(max_size=8), st.integers()), max_size=4)


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "some" / "folder" / digest("a")
    assert recall(path) is None
    remember(path, {"a": (1, b"2")})
    assert recall(path) == {"a": (1, b"2")}
    remember(path, "newer")
    assert recall(path) == "newer" and [each.name for each in path.parent.iterdir()] == [path.name]


@given(st.data())
def test_a_damaged_file_counts_as_missing(tmp_path_factory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("kept") / "x"
    remember(path, ["a result", 7])
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    assert recall(path) is None
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert recall(path) is None


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
    assert len(set(seen)) == len(seen) and sources((tmp_path,)) == seen[-1]
    (folder / "notes.txt").write_text("no code")
    assert sources((tmp_path,)) == seen[-1]
