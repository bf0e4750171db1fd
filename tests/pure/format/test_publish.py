"""Bundles are whole or absent: staging, sweeping, replacing, and what kill -9 leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cgbundle.format.publish import staged
from tests.helpers.places import ROOT
from tests.helpers.raising import raises

DEAD = 2**22 + 1
"""A process id above Linux's largest."""


def publish(destination: Path, text: str, *, replace: bool = False) -> None:
    with staged(destination, replace=replace) as stage:
        (stage / "host").mkdir()
        (stage / "host/file").write_text(text)


def content(destination: Path) -> str:
    return (destination / "host/file").read_text()


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def leftover(folder: Path, name: str, owner: int, suffix: str, text: str = "old") -> Path:
    path = folder / f".{name}.{owner}.0123abcd.{suffix}"
    (path / "host").mkdir(parents=True)
    (path / "host/file").write_text(text)
    return path


# --- one process ---------------------------------------------------------------------------------------------------


def test_a_bundle_appears_whole_when_the_block_ends(tmp_path: Path) -> None:
    with staged(tmp_path / "b.cgb", replace=False) as stage:
        (stage / "a").write_text("1")
        assert not (tmp_path / "b.cgb").exists()
        assert stage.parent == tmp_path
    assert (tmp_path / "b.cgb/a").read_text() == "1"
    assert hidden(tmp_path) == []


def test_missing_parents_are_made(tmp_path: Path) -> None:
    publish(tmp_path / "x/y/b.cgb", "1")
    assert content(tmp_path / "x/y/b.cgb") == "1"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_removes_the_stage_and_goes_on(tmp_path: Path, error: type[BaseException]) -> None:
    with raises(error), staged(tmp_path / "b.cgb", replace=False) as stage:
        (stage / "a").write_text("1")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_the_old_bundle_as_it_was(tmp_path: Path) -> None:
    publish(tmp_path / "b.cgb", "old")
    with pytest.raises(ValueError), staged(tmp_path / "b.cgb", replace=True) as stage:
        (stage / "a").write_text("1")
        raise ValueError
    assert content(tmp_path / "b.cgb") == "old"
    assert hidden(tmp_path) == []


def test_without_replace_an_existing_bundle_is_kept(tmp_path: Path) -> None:
    publish(tmp_path / "b.cgb", "old")
    with pytest.raises(OSError):
        publish(tmp_path / "b.cgb", "new")
    assert content(tmp_path / "b.cgb") == "old"
    assert hidden(tmp_path) == []


def test_with_replace_the_new_bundle_takes_the_place_at_the_end_only(tmp_path: Path) -> None:
    publish(tmp_path / "b.cgb", "old")
    (tmp_path / "b.cgb/more").write_text("only in the old one")
    with staged(tmp_path / "b.cgb", replace=True) as stage:
        (stage / "host").mkdir()
        (stage / "host/file").write_text("new")
        assert content(tmp_path / "b.cgb") == "old"
    assert content(tmp_path / "b.cgb") == "new"
    assert not (tmp_path / "b.cgb/more").exists()
    assert hidden(tmp_path) == []


def test_replace_works_where_there_is_nothing_to_replace(tmp_path: Path) -> None:
    publish(tmp_path / "b.cgb", "new", replace=True)
    assert content(tmp_path / "b.cgb") == "new"


def test_replacing_a_link_leaves_what_it_pointed_at(tmp_path: Path) -> None:
    publish(tmp_path / "v1.cgb", "old")
    (tmp_path / "b.cgb").symlink_to("v1.cgb")
    publish(tmp_path / "b.cgb", "new", replace=True)
    assert content(tmp_path / "b.cgb") == "new" and not (tmp_path / "b.cgb").is_symlink()
    assert content(tmp_path / "v1.cgb") == "old"
    assert hidden(tmp_path) == []


def test_replacing_a_file_leaves_no_trace_of_it(tmp_path: Path) -> None:
    (tmp_path / "b.cgb").write_text("a file")
    publish(tmp_path / "b.cgb", "new", replace=True)
    assert content(tmp_path / "b.cgb") == "new"
    assert hidden(tmp_path) == []


def test_everything_is_synced_before_the_rename_folders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watch(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watch)
    with staged(tmp_path / "b.cgb", replace=False) as stage:
        (stage / "a/b").mkdir(parents=True)
        (stage / "a/b/file").write_text("1")
        (stage / "empty").mkdir()
    staged_names = {path.removeprefix(str(stage)) for path in synced[:-1]}
    assert staged_names == {"", "/a", "/a/b", "/a/b/file", "/empty"}
    assert synced[-1] == str(tmp_path)


# --- leftovers -----------------------------------------------------------------------------------------------------


def test_the_stage_of_a_dead_process_is_swept(tmp_path: Path) -> None:
    old = leftover(tmp_path, "b.cgb", DEAD, "building")
    publish(tmp_path / "b.cgb", "new")
    assert not old.exists()


def test_the_stage_of_a_living_process_is_kept(tmp_path: Path) -> None:
    for owner in (os.getpid(), 1):
        leftover(tmp_path, "b.cgb", owner, "building")
    publish(tmp_path / "b.cgb", "new")
    assert len(hidden(tmp_path)) == 2


@pytest.mark.parametrize("name", ["gpt[1].cgb", "gpt*.cgb", "a b.cgb", ".cgb"])
def test_leftovers_are_found_under_any_name(tmp_path: Path, name: str) -> None:
    old = leftover(tmp_path, name, DEAD, "building")
    publish(tmp_path / name, "new")
    assert not old.exists()


@pytest.mark.parametrize("other", ["gpt.2.cgb", "gpt.2", f"gpt.{DEAD}", "gpt2", "xgpt", "gpt.cgb"])
def test_the_stage_of_another_bundle_is_not_touched(tmp_path: Path, other: str) -> None:
    """`gpt.4194305` is being built by process 1 while `gpt` is built here: 4194305 is no process of gpt's."""
    kept = leftover(tmp_path, other, 1, "building")
    publish(tmp_path / "gpt", "new")
    assert content(kept) == "old"


@pytest.mark.parametrize(
    "name", [".gpt.\u00b2.0123abcd.building", f".gpt.{10**30}.0123abcd.building", ".gpt.x.y.building", ".gpt..."]
)
def test_strange_names_beside_the_destination_do_no_harm(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    publish(tmp_path / "gpt", "new")
    assert content(tmp_path / "gpt") == "new"


def test_an_old_bundle_whose_replacement_was_finished_is_swept(tmp_path: Path) -> None:
    publish(tmp_path / "b.cgb", "new")
    leftover(tmp_path, "b.cgb", DEAD, "old")
    publish(tmp_path / "b.cgb", "newer", replace=True)
    assert content(tmp_path / "b.cgb") == "newer" and hidden(tmp_path) == []


def test_an_old_bundle_left_between_the_two_renames_is_put_back_first(tmp_path: Path) -> None:
    leftover(tmp_path, "b.cgb", DEAD, "old", "precious")
    leftover(tmp_path, "b.cgb", DEAD, "building", "half")
    with pytest.raises(ValueError), staged(tmp_path / "b.cgb", replace=True):
        assert content(tmp_path / "b.cgb") == "precious"
        raise ValueError
    assert content(tmp_path / "b.cgb") == "precious"
    assert hidden(tmp_path) == []


def test_a_failed_second_rename_puts_the_old_bundle_back(tmp_path: Path) -> None:
    """Somebody takes the stage away in the last moment."""
    publish(tmp_path / "b.cgb", "old")
    rename = Path.rename

    def thief(self: Path, target: Path) -> Path:
        if self.suffix == ".building":
            raise OSError("stolen")
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="stolen"):
        patch.setattr(Path, "rename", thief)
        publish(tmp_path / "b.cgb", "new", replace=True)
    assert content(tmp_path / "b.cgb") == "old"
    assert hidden(tmp_path) == []


# --- kill -9 -------------------------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
from pathlib import Path
from cgbundle.format.publish import staged

moment, destination, replace = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "replace"

def die():
    os.kill(os.getpid(), signal.SIGKILL)

count = 0
rename = Path.rename
def renaming(self, target):
    global count
    count += 1
    if moment == f"before rename {count}":
        die()
    made = rename(self, target)
    if moment == f"after rename {count}":
        die()
    return made
Path.rename = renaming

with staged(destination, replace=replace) as stage:
    if moment == "empty":
        die()
    (stage / "host").mkdir()
    (stage / "host/file").write_text("new")
    if moment == "written":
        die()
"""


def killed(moment: str, destination: Path, mode: str) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", CHILD, moment, str(destination), mode], env={"PYTHONPATH": str(ROOT / "bundles")}, check=False
    )
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("moment", ["empty", "written", "before rename 1"])
def test_a_killed_build_leaves_no_bundle_and_the_next_one_succeeds(tmp_path: Path, moment: str) -> None:
    killed(moment, tmp_path / "b.cgb", "new")
    assert not (tmp_path / "b.cgb").exists()
    assert len(hidden(tmp_path)) == 1
    publish(tmp_path / "b.cgb", "next")
    assert content(tmp_path / "b.cgb") == "next" and hidden(tmp_path) == []


@pytest.mark.parametrize(
    ("moment", "seen"),
    [
        ("written", "old"),
        ("before rename 1", "old"),
        ("after rename 1", None),
        ("before rename 2", None),
        ("after rename 2", "new"),
    ],
)
def test_a_killed_replacement_loses_neither_bundle(tmp_path: Path, moment: str, seen: str | None) -> None:
    """Between the two renames nothing stands at the destination; the old bundle stands beside it and the next build restores it."""
    publish(tmp_path / "b.cgb", "old")
    killed(moment, tmp_path / "b.cgb", "replace")
    assert (content(tmp_path / "b.cgb") if (tmp_path / "b.cgb").exists() else None) == seen
    with pytest.raises(ValueError), staged(tmp_path / "b.cgb", replace=True):
        assert content(tmp_path / "b.cgb") == (seen or "old")
        raise ValueError
    publish(tmp_path / "b.cgb", "next", replace=True)
    assert content(tmp_path / "b.cgb") == "next" and hidden(tmp_path) == []
