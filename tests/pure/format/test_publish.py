"""A published bundle is complete or absent: staging folders, locks, removal of old staging folders, exchanges, and kill -9."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cgcompile.bundle import publish as publishing
from cgcompile.bundle.publish import staged
from tests.helpers.places import ROOT
from tests.helpers.raising import raises

STEPS = ["in one step", "in two steps"]
"""The ways in which two directories exchange names: with renameat2, and where that is refused."""


def publish(destination: Path, text: str, *, replace: bool = False) -> None:
    with staged(destination, replace=replace) as stage:
        (stage / "host").mkdir()
        (stage / "host/file").write_text(text)


def content(destination: Path) -> str:
    return (destination / "host/file").read_text()


@pytest.fixture(params=STEPS)
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == STEPS[1]:
        monkeypatch.setattr(publishing, "_rename", lambda source, target, flags: False)


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def leftover(folder: Path, name: str, suffix: str, text: str = "old") -> Path:
    path = folder / f".{name}.0123abcd.{suffix}"
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


def test_a_relative_path_is_of_the_folder_in_which_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with staged(Path("b.cgb"), replace=False) as stage:
        (stage / "a").write_text("1")
        monkeypatch.chdir("elsewhere")
    assert sorted(os.listdir(tmp_path)) == ["b.cgb", "elsewhere"] and os.listdir(tmp_path / "elsewhere") == []


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


def test_without_replace_an_existing_bundle_is_kept_before_any_work(tmp_path: Path) -> None:
    publish(tmp_path / "b.cgb", "old")
    with pytest.raises(FileExistsError), staged(tmp_path / "b.cgb", replace=False):
        pytest.fail("the work began")
    assert content(tmp_path / "b.cgb") == "old"
    assert hidden(tmp_path) == []


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("kind", ["a bundle", "a file", "a link to nowhere"])
def test_without_replace_what_came_meanwhile_is_kept(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "b.cgb"
    with pytest.raises(FileExistsError, match="b.cgb"), staged(path, replace=False) as stage:
        (stage / "a").write_text("1")
        if kind == "a bundle":
            (path / "host").mkdir(parents=True)
        elif kind == "a file":
            path.write_text("a file")
        else:
            path.symlink_to("nowhere")
    assert os.path.lexists(path) and not (path / "a").exists()
    assert hidden(tmp_path) == []


@pytest.mark.usefixtures("steps")
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


@pytest.mark.usefixtures("steps")
def test_replacing_a_link_leaves_what_it_pointed_at(tmp_path: Path) -> None:
    publish(tmp_path / "v1.cgb", "old")
    (tmp_path / "b.cgb").symlink_to("v1.cgb")
    publish(tmp_path / "b.cgb", "new", replace=True)
    assert content(tmp_path / "b.cgb") == "new" and not (tmp_path / "b.cgb").is_symlink()
    assert content(tmp_path / "v1.cgb") == "old"
    assert hidden(tmp_path) == []


@pytest.mark.usefixtures("steps")
def test_replacing_a_file_leaves_no_trace_of_it(tmp_path: Path) -> None:
    (tmp_path / "b.cgb").write_text("a file")
    publish(tmp_path / "b.cgb", "new", replace=True)
    assert content(tmp_path / "b.cgb") == "new"
    assert hidden(tmp_path) == []


@pytest.mark.usefixtures("steps")
def test_a_bundle_that_goes_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "b.cgb", "old")
    seen = os.path.lexists

    def lexists(path: Path) -> bool:
        exists = seen(path)
        if exists and path == tmp_path / "b.cgb":
            publishing._remove(path)
        return exists

    with staged(tmp_path / "b.cgb", replace=True) as stage:
        (stage / "host").mkdir()
        (stage / "host/file").write_text("new")
        monkeypatch.setattr(os.path, "lexists", lexists)
    assert content(tmp_path / "b.cgb") == "new" and hidden(tmp_path) == []


def test_a_reader_by_path_finds_the_old_or_the_new_bundle_always(tmp_path: Path) -> None:
    """Eighty exchanges run beside a reader that only opens and looks."""
    path = tmp_path / "b.cgb"
    publish(path, "0")
    done, missing = threading.Event(), 0

    def read() -> None:
        nonlocal missing
        while not done.is_set():
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
            except FileNotFoundError:
                missing += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(80):
            publish(path, str(number), replace=True)
    finally:
        done.set()
        reader.join()
    assert missing == 0 and content(path) == "79"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_exchange_is_served_in_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    class Library:
        def renameat2(self, *arguments: object) -> int:
            publishing.ctypes.set_errno(code)
            return -1

    publish(tmp_path / "b.cgb", "old")
    monkeypatch.setattr(publishing.ctypes, "CDLL", lambda *arguments, **options: Library())
    publish(tmp_path / "b.cgb", "new", replace=True)
    publish(tmp_path / "c.cgb", "other")
    assert content(tmp_path / "b.cgb") == "new" and content(tmp_path / "c.cgb") == "other" and hidden(tmp_path) == []


@pytest.mark.skipif(publishing.platform.machine() not in publishing.RENAMEAT2, reason="the number of the call is unknown")
def test_a_c_library_without_the_function_takes_the_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = publishing.ctypes.CDLL(None, use_errno=True)

    class Library:
        syscall = real.syscall

    monkeypatch.setattr(publishing.ctypes, "CDLL", lambda *arguments, **options: Library())
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert publishing._rename(tmp_path / "a", tmp_path / "b", publishing.EXCHANGE)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    with pytest.raises(FileExistsError):
        publishing._rename(tmp_path / "a", tmp_path / "b", publishing.NOREPLACE)


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


# --- one at a time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replace", [False, True])
def test_a_second_builder_is_told_before_any_work(tmp_path: Path, replace: bool) -> None:
    with staged(tmp_path / "b.cgb", replace=False) as stage:
        (stage / "host").mkdir()
        (stage / "host/file").write_text("first")
        with pytest.raises(BlockingIOError, match="b.cgb"), staged(tmp_path / "b.cgb", replace=replace):
            pytest.fail("the work began")
        publish(tmp_path / "other.cgb", "another bundle in the same folder")
    assert content(tmp_path / "b.cgb") == "first" and hidden(tmp_path) == []


def test_the_lock_that_a_killed_process_left_is_taken(tmp_path: Path) -> None:
    (tmp_path / ".b.cgb.lock").touch()
    publish(tmp_path / "b.cgb", "new")
    assert content(tmp_path / "b.cgb") == "new" and hidden(tmp_path) == []


def test_a_lock_whose_file_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removes the lock file after this process has opened it and before it has the lock."""
    flock, calls = fcntl.flock, 0

    def late(handle: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            (tmp_path / ".b.cgb.lock").unlink()
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with staged(tmp_path / "b.cgb", replace=False), pytest.raises(BlockingIOError), staged(tmp_path / "b.cgb", replace=False):
        pytest.fail("two have the lock")
    assert calls >= 3


def test_a_lock_that_may_only_be_read_is_taken_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".b.cgb.lock").touch()
    open_ = os.open

    def refusing(path: object, flags: int, *rest: int) -> int:
        if str(path).endswith(".lock") and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "not yours")
        return open_(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)
    with staged(tmp_path / "b.cgb", replace=False), pytest.raises(BlockingIOError), staged(tmp_path / "b.cgb", replace=False):
        pytest.fail("two have the lock")


def test_no_lock_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without locks, a staging folder may belong to a running process, and must stay."""

    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    kept = leftover(tmp_path, "b.cgb", "building")
    publish(tmp_path / "b.cgb", "new")
    assert content(tmp_path / "b.cgb") == "new" and hidden(tmp_path) == [kept.name]
    publish(tmp_path / "b.cgb", "newer", replace=True)
    assert content(tmp_path / "b.cgb") == "newer"


# --- leftovers -----------------------------------------------------------------------------------------------------


SECOND = """
import sys
from pathlib import Path
from cgcompile.bundle.publish import staged
with staged(Path(sys.argv[1]), replace=True):
    pass
"""


def test_the_stage_of_a_running_process_is_kept_whatever_its_number(tmp_path: Path) -> None:
    """A builder in another container may have a process number that no process has here. Its lock shows that it runs."""
    with staged(tmp_path / "b.cgb", replace=True) as stage:
        (stage / "a").touch()
        command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", sys.executable, "-S", "-c", SECOND]
        if subprocess.run(["unshare", "--user", "--map-root-user", "--pid", "--fork", "true"], capture_output=True).returncode:
            command = command[5:]  # without namespaces: only another process
        done = subprocess.run(
            [*command, str(tmp_path / "b.cgb")],
            env={"PYTHONPATH": str(ROOT / "bundles")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "BlockingIOError" in done.stderr and (stage / "a").exists()


@pytest.mark.parametrize("name", ["gpt[1].cgb", "gpt*.cgb", "a b.cgb", ".cgb"])
def test_leftovers_are_found_under_any_name(tmp_path: Path, name: str) -> None:
    old = leftover(tmp_path, name, "building")
    publish(tmp_path / name, "new")
    assert not old.exists()


@pytest.mark.parametrize("other", ["gpt.2.cgb", "gpt.2", "gpt.0123abcd", "gpt2", "xgpt", "gpt.cgb"])
def test_the_stage_of_another_bundle_is_not_touched(tmp_path: Path, other: str) -> None:
    kept = leftover(tmp_path, other, "building")
    publish(tmp_path / "gpt", "new")
    assert content(kept) == "old"


@pytest.mark.parametrize("name", [".gpt.\u00b2.building", ".gpt.0123ABCD.building", ".gpt.1.0123abcd.building", ".gpt..."])
def test_strange_names_beside_the_destination_do_no_harm(tmp_path: Path, name: str) -> None:
    beside = os.path.join(os.fsencode(tmp_path), name.encode())  # a locale without UTF-8 cannot encode the name
    os.mkdir(beside)
    publish(tmp_path / "gpt", "new")
    assert content(tmp_path / "gpt") == "new" and os.path.exists(beside)


def test_an_old_bundle_whose_replacement_was_finished_is_swept(tmp_path: Path) -> None:
    publish(tmp_path / "b.cgb", "new")
    leftover(tmp_path, "b.cgb", "old")
    publish(tmp_path / "b.cgb", "newer", replace=True)
    assert content(tmp_path / "b.cgb") == "newer" and hidden(tmp_path) == []


def test_an_old_bundle_left_between_the_two_renames_is_put_back_first(tmp_path: Path) -> None:
    leftover(tmp_path, "b.cgb", "old", "precious")
    leftover(tmp_path, "b.cgb", "building", "half")
    with pytest.raises(ValueError), staged(tmp_path / "b.cgb", replace=True):
        assert content(tmp_path / "b.cgb") == "precious"
        raise ValueError
    assert content(tmp_path / "b.cgb") == "precious"
    assert hidden(tmp_path) == []


def test_an_old_bundle_that_is_put_back_is_not_built_over(tmp_path: Path) -> None:
    leftover(tmp_path, "b.cgb", "old", "precious")
    with pytest.raises(FileExistsError), staged(tmp_path / "b.cgb", replace=False):
        pytest.fail("the work began")
    assert content(tmp_path / "b.cgb") == "precious"


def test_a_failed_second_rename_puts_the_old_bundle_back(tmp_path: Path) -> None:
    """The second rename fails, as if another process had removed the staging folder."""
    publish(tmp_path / "b.cgb", "old")
    rename = Path.rename

    def thief(self: Path, target: Path) -> Path:
        if self.suffix == ".building":
            raise OSError("stolen")
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="stolen"):
        patch.setattr(publishing, "_rename", lambda source, target, flags: False)
        patch.setattr(Path, "rename", thief)
        publish(tmp_path / "b.cgb", "new", replace=True)
    assert content(tmp_path / "b.cgb") == "old"
    assert hidden(tmp_path) == []


# --- kill -9 -------------------------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
from pathlib import Path
from cgcompile.bundle import publish

moment, destination, replace, exchanges = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "replace", sys.argv[4] == "in one step"

def die():
    os.kill(os.getpid(), signal.SIGKILL)

count = 0
def counted(rename):
    def renaming(*arguments):
        global count
        count += 1
        if moment == f"before rename {count}":
            die()
        made = rename(*arguments)
        if moment == f"after rename {count}":
            die()
        return made
    return renaming

if exchanges:
    publish._rename = counted(publish._rename)
else:
    publish._rename = lambda source, target, flags: False
    Path.rename = counted(Path.rename)

with publish.staged(destination, replace=replace) as stage:
    if moment == "empty":
        die()
    (stage / "host").mkdir()
    (stage / "host/file").write_text("new")
    if moment == "written":
        die()
"""


def killed(moment: str, destination: Path, mode: str, steps: str = STEPS[0]) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", CHILD, moment, str(destination), mode, steps],
        env={"PYTHONPATH": str(ROOT / "bundles")}, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("moment", ["empty", "written", "before rename 1"])
def test_a_killed_build_leaves_no_bundle_and_the_next_one_succeeds(tmp_path: Path, moment: str) -> None:
    killed(moment, tmp_path / "b.cgb", "new")
    assert not (tmp_path / "b.cgb").exists()
    assert [Path(name).suffix for name in hidden(tmp_path)] == [".building", ".lock"]
    publish(tmp_path / "b.cgb", "next")
    assert content(tmp_path / "b.cgb") == "next" and hidden(tmp_path) == []


@pytest.mark.parametrize(
    ("moment", "seen", "steps"),
    [
        ("written", "old", STEPS[0]),
        ("before rename 1", "old", STEPS[0]),
        ("after rename 1", "new", STEPS[0]),
        ("before rename 1", "old", STEPS[1]),
        ("after rename 1", None, STEPS[1]),
        ("before rename 2", None, STEPS[1]),
        ("after rename 2", "new", STEPS[1]),
        ("after rename 3", "new", STEPS[1]),
    ],
)
def test_a_killed_replacement_loses_neither_bundle(tmp_path: Path, moment: str, seen: str | None, steps: str) -> None:
    """With one step, the destination always has one of the two bundles. With two steps, it has none for a moment. Then the old
    bundle is in a folder beside it, and the next build restores it."""
    publish(tmp_path / "b.cgb", "old")
    killed(moment, tmp_path / "b.cgb", "replace", steps)
    assert (content(tmp_path / "b.cgb") if (tmp_path / "b.cgb").exists() else None) == seen
    with pytest.raises(ValueError), staged(tmp_path / "b.cgb", replace=True):
        assert content(tmp_path / "b.cgb") == (seen or "old")
        raise ValueError
    publish(tmp_path / "b.cgb", "next", replace=True)
    assert content(tmp_path / "b.cgb") == "next" and hidden(tmp_path) == []
