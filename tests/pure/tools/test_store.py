"""A store of bundles: equal files once, names that are exchanged in one step, and a collection that spares what is loaded."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgbundle.format import file_names
from cgbundle.format.archive import Archive
from cgbundle.format.open_files import KeptFile, is_kept
from cgbundle.format.schema import Manifest
from cgbundle.validate.bundle import check_bundle
from cgcompile import Store
from tests.helpers.bundles import rank_bundles
from tests.helpers.bundles.tiny_bundle import write_bundle
from tests.helpers.places import GOLDEN, ROOT
from tests.helpers.raising import raises

BIG = 1 << 20


def bundle(folder: Path, number: int) -> Path:
    """A bundle of the one model that all tests here have: equal weights of a megabyte and more, an exported program of its own."""

    def change(made: Manifest) -> Manifest:
        (folder / file_names.PROGRAM).write_bytes(number.to_bytes(8, "little") * 100)
        (folder / "kernels.json").write_bytes(b"weights of a model " * (BIG // 16))
        return made

    return write_bundle(folder, change)


def space(folder: Path) -> int:
    """The bytes that the disk has of a folder's files."""
    found = {os.stat(path).st_ino: os.stat(path).st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}
    return sum(found.values())


def sound(path: Path) -> bool:
    check_bundle(Archive(str(path)), "full")
    return True


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """One with a bundle called first.cgb and one called second.cgb."""
    made = Store(tmp_path / "store")
    for number, name in enumerate(("first", "second")):
        made.add(bundle(tmp_path / f"{name}.cgb", number))
    return made


def test_bundles_of_one_model_take_the_space_of_one_and_their_differences(tmp_path: Path) -> None:
    store, before = Store(tmp_path / "store"), 0
    for number in range(3):
        made = bundle(tmp_path / f"{number}.cgb", number)
        added = store.add(made)
        assert sound(added.path) and added.path == tmp_path / "store" / made.name
        manifest, grown = (made / file_names.MANIFEST).stat().st_size, space(store.path) - before
        assert grown == added.new
        assert added.bytes > BIG and added.new == (added.bytes if not number else 800 + manifest)
        before = space(store.path)
    assert [each.own for each in store.bundles()] == [800 + manifest] * 3


def test_what_is_added_is_read_only_and_its_original_is_nobodys_link(store: Store, tmp_path: Path) -> None:
    for path in store.path.rglob("*"):
        assert path.is_dir() or path.is_symlink() or path.name == ".lock" or path.stat().st_mode & 0o777 == 0o444, path
    for path in (tmp_path / "first.cgb").rglob("*"):
        assert path.is_dir() or path.stat().st_nlink == 1


def test_a_damaged_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    made = bundle(tmp_path / "m.cgb", 0)
    data = bytearray((made / "kernels.json").read_bytes())
    data[BIG // 2] ^= 1
    (made / "kernels.json").write_bytes(data)
    store = Store(tmp_path / "store")
    with raises("file-damaged", "kernels.json: SHA-256 is"):
        store.add(made)
    assert store.bundles() == () and not list(store.path.rglob("*.part")) and not (store.path / "m.cgb").is_symlink()


def test_a_file_that_was_cut_in_the_store_is_taken_in_again(store: Store, tmp_path: Path) -> None:
    kept = os.path.realpath(store.path / "first.cgb")
    os.chmod(f"{kept}/kernels.json", 0o600)
    os.truncate(f"{kept}/kernels.json", 5)
    assert sound(store.add(bundle(tmp_path / "third.cgb", 3)).path)


def test_a_name_leads_to_another_bundle_only_when_asked_to(store: Store, tmp_path: Path) -> None:
    first, second = (Path(os.path.realpath(store.path / f"{name}.cgb")) for name in ("first", "second"))
    assert store.add(tmp_path / "first.cgb").new == 0
    with raises("output-exists", "first.cgb: is another bundle"):
        store.add(tmp_path / "second.cgb", "first.cgb")
    for wanted, source in ((second, "second.cgb"), (first, "first.cgb")):  # and back again
        store.add(tmp_path / source, "first.cgb", replace=True)
        assert Path(os.path.realpath(store.path / "first.cgb")) == wanted


def test_a_signature_comes_along_also_later(store: Store, tmp_path: Path) -> None:
    (tmp_path / "first.cgb" / file_names.SIGNATURE).write_bytes(bytes(96))
    added = store.add(tmp_path / "first.cgb")
    assert added.new == 0 and (added.path / file_names.SIGNATURE).read_bytes() == bytes(96) and sound(added.path)


def test_only_what_no_name_leads_to_is_collected(store: Store) -> None:
    assert store.collect().bundles == ()
    [first, _] = store.bundles()
    store.remove("first.cgb")
    kept = space(store.path)
    told = store.collect(dry_run=True)
    assert (told.bundles, told.files, told.bytes) == ((first.digest,), 1, 800) and space(store.path) == kept
    assert store.collect() == told
    assert [each.names for each in store.bundles()] == [("second.cgb",)] and sound(store.path / "second.cgb")
    store.remove("second.cgb")
    store.collect()
    assert space(store.path) == 0


def test_what_is_loaded_stays_until_it_is_closed(store: Store) -> None:
    """Of a process of its own, too."""
    first, second = store.bundles()
    opened = [Archive(str(each.path)) for each in (first, second)]
    kept = opened[0].kept(file_names.EXAM)
    code = f"""
from cgbundle.format.archive import Archive
from cgbundle.format.file_names import EXAM
kept = Archive({str(second.path)!r}).kept(EXAM)
print(flush=True)
input()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bundles")}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        for each in opened:
            each.close()
        assert [each.loaded for each in store.bundles()] == [True, True]
        for name in ("first.cgb", "second.cgb"):
            store.remove(name)
        found = store.collect()
        assert (found.bundles, set(found.loaded)) == ((), {first.digest, second.digest})
        other.communicate("\n")
    assert isinstance(kept, KeptFile)
    del kept
    assert set(store.collect().bundles) == {first.digest, second.digest} or not store.bundles()


def test_a_loaded_bundle_says_nothing_of_another_one_with_the_same_exam(store: Store) -> None:
    first, second = store.bundles()
    exams = [each.path / file_names.EXAM for each in (first, second)]
    assert exams[0].samefile(exams[1])
    kept = Archive(str(first.path)).kept(file_names.EXAM)
    with open(exams[1], "rb") as exam:
        assert is_kept(exam.fileno())  # what a store of an earlier version asks
    assert [each.loaded for each in store.bundles()] == [True, False]
    for name in ("first.cgb", "second.cgb"):
        store.remove(name)
    found = store.collect()
    assert (found.bundles, found.loaded) == ((second.digest,), (first.digest,)) and sound(first.path)
    assert isinstance(kept, KeptFile)
    del kept
    assert store.collect().bundles == (first.digest,)


def test_a_runtime_that_locks_the_exam_alone_keeps_every_bundle_that_has_it(store: Store) -> None:
    """The runtime before manifests were locked."""
    with open(store.bundles()[0].path / file_names.EXAM, "rb") as exam:
        kept = KeptFile(exam.fileno())
    assert [each.loaded for each in store.bundles()] == [True, True]
    del kept
    assert [each.loaded for each in store.bundles()] == [False, False]


def test_a_rank_that_is_loaded_keeps_the_whole_bundle(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    rank_bundles.write(tmp_path / "two.cgb", next((GOLDEN / "v1/gpt_two.cgb/kernels").iterdir()).read_bytes())
    added = store.add(tmp_path / "two.cgb")
    with_ranks = Archive(str(added.path))
    rank = with_ranks.rank(1)
    kept = rank.kept(file_names.EXAM)
    for each in (rank, with_ranks):
        each.close()
    assert [each.loaded for each in store.bundles()] == [True]
    del kept
    assert [each.loaded for each in store.bundles()] == [False]


def test_nothing_is_collected_while_a_bundle_is_added(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interfere(*_: object, **__: object) -> int:
        with raises("store-busy", "another process adds to the store"):
            Store(store.path).collect()
        return 0

    monkeypatch.setattr(Store, "_keep", interfere)
    store.add(tmp_path / "first.cgb")


def test_what_a_killed_process_left_is_collected(store: Store) -> None:
    [digest] = [each.digest for each in store.bundles() if each.names == ("first.cgb",)]
    (store.path / "bundles" / f".{digest}.removed").mkdir()
    (store.path / "bundles" / f".{digest}.00000000.building").mkdir()
    (store.path / "files" / digest[:2]).mkdir(exist_ok=True)
    (store.path / "files" / digest[:2] / ".00.part").write_bytes(b"half")
    os.symlink("bundles/nothing", store.path / ".00.link")
    assert store.collect().bytes == 4
    assert not [path for path in store.path.rglob(".*") if path.name != ".lock"] and sound(store.path / "first.cgb")


def test_folders_and_names_that_are_none(store: Store, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("")
    with raises("store-invalid", "other: holds something else than a store"):
        Store(tmp_path / "other")
    with raises("store-missing", "nothing: no such store"):
        Store(tmp_path / "nothing").bundles()
    for name in ("files", "bundles", ".x", "a/b", "a\nb"):
        with raises("store-name-invalid", "no name for a bundle"):
            store.add(tmp_path / "first.cgb", name)
    (store.path / "mine.cgb").mkdir()
    with raises("store-name-invalid", "exists and is none of the store's names"):
        store.add(tmp_path / "first.cgb", "mine.cgb")
    with raises("store-name-unknown", "no bundle is called 'third.cgb'; there are first.cgb, second.cgb"):
        store.remove("third.cgb")


def test_a_file_system_without_links_or_locks(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    added = store.add(bundle(tmp_path / "third.cgb", 3))
    assert sound(added.path) and (added.path / "kernels.json").stat().st_nlink == 1
    store.collect()
    assert sound(added.path)

    def unlockable(*_: object) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("cgcompile.tools.store.is_kept", unlockable)
    with raises("store-invalid", "its file system has no locks"):
        store.bundles()


@settings(max_examples=15)
@given(st.lists(st.tuples(st.sampled_from(("add", "remove", "collect")), st.integers(0, 2), st.sampled_from(("a", "b", "c")))))
def test_whatever_is_done_named_bundles_are_whole_and_nothing_else_stays(steps: list[tuple[str, int, str]]) -> None:
    with TemporaryDirectory() as folder:
        made = [write_bundle(Path(folder, f"{number}.cgb"), lambda m, n=number: replace(m, name=f"m{n}")) for number in range(3)]  # type: ignore[misc]
        store, named = Store(Path(folder, "store")), dict[str, int]()
        store.add(made[0], "a")
        named["a"] = 0
        for step, number, name in steps:
            if step == "add":
                store.add(made[number], name, replace=True)
                named[name] = number
            elif step == "remove" and name in named:
                store.remove(name)
                del named[name]
            elif step == "collect":
                store.collect()
        store.collect()
        assert {name for each in store.bundles() for name in each.names} == named.keys()
        assert len(store.bundles()) == len(set(named.values()))
        for name, number in named.items():
            assert Archive(str(store.path / name)).manifest.name == f"m{number}" and sound(store.path / name)
        files = {file.sha256 for each in store.bundles() for file in each.manifest.files}
        assert {path.name for path in (store.path / "files").rglob("*") if path.is_file()} == files
