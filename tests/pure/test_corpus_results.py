"""The rows of a run of the corpus survive any interruption, and the next run does only the remaining cases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.corpus.results import BUILT, FAILED, MISSING, RIGHT, STOPPED, UNDONE, Row, append, left, read


@dataclass(frozen=True)
class Named:
    """A case without its model."""

    name: str
    members: tuple[Named, ...] = ()


def row(name: str, verdict: str = RIGHT, target: str = "sm_90", seconds: float = 0.0) -> Row:
    return Row(name=name, target=target, verdict=verdict, seconds=seconds, stages={"lower": 1.5})


def test_rows_are_read_as_they_were_written_and_the_last_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert read(path) == []
    for record in (row("a", STOPPED), row("b"), row("a", RIGHT, seconds=2.0), row("a", RIGHT, "cuda")):
        append(path, record)
    assert read(path) == [row("a", RIGHT, seconds=2.0), row("b"), row("a", RIGHT, "cuda")]
    assert path.read_bytes().count(b"\n") == 4


def test_a_line_that_was_cut_off_costs_no_other_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append(path, row("a"))
    whole = path.read_bytes()
    append(path, row("b"))
    second = path.read_bytes()
    for end in range(len(whole), len(second)):  # killed during the second row: `{"name": "b", ... {"lower": 1.5}` too
        path.write_bytes(second[:end])
        append(path, row("c"))
        whole_line = end == len(second) - 1  # complete except for the newline
        assert [row.name for row in read(path)] == (["a", "b", "c"] if whole_line else ["a", "c"])


def test_rows_of_several_files_are_one_run(tmp_path: Path) -> None:
    append(tmp_path / "one", row("a", BUILT))
    append(tmp_path / "two", row("a"))
    assert read(tmp_path / "one", tmp_path / "none", tmp_path / "two") == [row("a")]


def test_what_has_no_row_for_a_target_is_left() -> None:
    cases = [Named("a"), Named("b"), Named("c"), Named("d")]
    rows = [row("a"), row("b", MISSING), row("c", STOPPED), row("d", RIGHT, "cuda")]
    assert [case.name for case in left(cases, "sm_90", rows)] == ["b", "c", "d"]
    assert [case.name for case in left(cases, "cuda", rows)] == ["a", "b", "c"]
    assert [case.name for case in left(cases, "sm_90", [row("a", BUILT)], (*UNDONE, BUILT))] == ["a", "b", "c", "d"]


def test_members_of_a_group_that_is_not_right_are_left() -> None:
    group = Named("g", (Named("x"), Named("y")))
    assert [case.name for case in left([group], "sm_90", [])] == ["g"]
    assert left([group], "sm_90", [row("g")]) == []
    assert [case.name for case in left([group], "sm_90", [row("g", FAILED), row("x")])] == ["y"]
