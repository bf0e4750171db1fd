"""push and pull leave a complete bundle or none, wherever they are interrupted, and all bytes arrive unchanged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cgbundle.errors import BundleError
from cgbundle.format import file_names
from cgbundle.format.archive import Archive
from cgbundle.format.schema import Manifest
from cgbundle.validate.bundle import check_bundle
from cgcompile import BuildError, pull, push
from cgcompile.bundle import manifest_text
from cgcompile.bundle.manifest_text import bundle_bytes
from tests.helpers.bundles.tiny_bundle import write_bundle
from tests.helpers.raising import raises

fsspec: Any = pytest.importorskip("fsspec")

URLS = ("memory://models/tiny.cgb", "{tmp}/far/tiny.cgb", "file://{tmp}/far/tiny.cgb")


class Broken(ConnectionError):
    """An error for a lost network connection."""


def same(a: Path, b: Path) -> bool:
    names = manifest_text.list_files(str(a))
    return names == manifest_text.list_files(str(b)) and all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = write_bundle(tmp_path / "tiny.cgb")
    (folder / file_names.SIGNATURE).write_bytes(bytes(96))
    return folder


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Returns the same model with another exported program."""

    def change(manifest: Manifest) -> Manifest:
        (tmp_path / "other.cgb" / file_names.PROGRAM).write_bytes(b"another one")
        return manifest

    return write_bundle(tmp_path / "other.cgb", change)


@pytest.fixture(params=URLS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    return str(request.param).format(tmp=tmp_path)


def breaking(monkeypatch: pytest.MonkeyPatch, url: str, method: str, fails: Callable[[int, str], bool]) -> None:
    """Makes the file system of `url` raise in each call for which `fails(number of the call, path)` is true."""
    kind, done = type(fsspec.core.url_to_fs(url)[0]), [0]
    real = getattr(kind, method)

    def call(self: Any, path: str, *arguments: Any, **named: Any) -> Any:
        done[0] += 1
        if fails(done[0], path):
            raise Broken("the network is gone")
        return real(self, path, *arguments, **named)

    monkeypatch.setattr(kind, method, call)


def test_what_is_pulled_is_what_was_pushed(bundle: Path, url: str, tmp_path: Path) -> None:
    pushed = push(bundle, url)
    assert pushed.place == url and pushed.moved == bundle_bytes(pushed.manifest)
    pulled = pull(url, tmp_path / "back.cgb")
    assert pulled.moved == pushed.moved and same(bundle, tmp_path / "back.cgb")
    assert push(bundle, url).moved == 0
    assert {path.name for path in tmp_path.iterdir()} <= {"tiny.cgb", "back.cgb", "far"}


def test_the_folder_of_a_pushed_bundle_is_a_bundle(bundle: Path, tmp_path: Path) -> None:
    push(bundle, str(tmp_path / "far"))
    check_bundle(Archive(str(tmp_path / "far")), "full")


def test_another_bundle_is_replaced_only_when_asked_to(bundle: Path, other: Path, url: str, tmp_path: Path) -> None:
    push(bundle, url)
    with raises("output-exists", "another bundle is there already"):
        push(other, url)
    moved = push(other, url, replace=True).moved - (other / file_names.MANIFEST).stat().st_size
    assert moved < 1000  # weights and self-test are the same
    with raises("output-exists", "tiny.cgb: exists"):
        pull(url, bundle)
    pull(url, bundle, replace=True)
    assert same(bundle, other)  # the old bundle's signature is gone


@pytest.mark.parametrize("call", range(1, 5))
def test_an_interrupted_push_leaves_no_bundle_and_goes_on(
    bundle: Path, url: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cgcompile.tools.transfer.AT_ONCE", 1)
    with monkeypatch.context() as patch:
        breaking(patch, url, "put_file", lambda number, path: number >= call)
        with raises("remote-failed", "the network is gone"):
            push(bundle, url)
    with raises("not-a-bundle", "not a bundle, or its push is not complete"):
        pull(url, tmp_path / "back.cgb")
    left = push(bundle, url)
    files = sorted((file.bytes for file in left.manifest.files), reverse=True)
    assert left.moved == sum(files[call - 1 :]) + (bundle / file_names.MANIFEST).stat().st_size
    pull(url, tmp_path / "back.cgb")
    assert same(bundle, tmp_path / "back.cgb")


def test_a_replacement_that_is_interrupted_leaves_no_mixture(
    bundle: Path, other: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is removed before the first file is replaced, so that no reader combines files of two bundles."""
    push(bundle, url)
    with monkeypatch.context() as patch:
        breaking(patch, url, "mv", lambda number, path: number == 1)
        with raises("remote-failed", "the network is gone"):
            push(other, url, replace=True)
    with raises("not-a-bundle", "its push is not complete"):
        pull(url, tmp_path / "back.cgb")
    push(other, url)
    pull(url, tmp_path / "back.cgb")
    assert same(other, tmp_path / "back.cgb")


def test_an_interrupted_pull_leaves_no_bundle_and_goes_on(
    bundle: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes an interruption inside a file, with only its first half written."""
    pushed = push(bundle, url)
    with monkeypatch.context() as patch:
        breaking(patch, url, "open", lambda number, path: path.endswith(file_names.SELF_TEST))
        with raises("remote-failed", "the network is gone"):
            pull(url, tmp_path / "back.cgb")
    assert not (tmp_path / "back.cgb").exists()
    [self_test] = [file for file in pushed.manifest.files if file.path == file_names.SELF_TEST]
    [left] = tmp_path.glob(".back.cgb.*.pull")
    (left / self_test.sha256).write_bytes((bundle / file_names.SELF_TEST).read_bytes()[: self_test.bytes // 2])
    arrived = sum(path.stat().st_size for path in left.iterdir())
    assert pull(url, tmp_path / "back.cgb").moved == bundle_bytes(pushed.manifest) - arrived
    assert same(bundle, tmp_path / "back.cgb") and not left.exists()


def test_what_arrives_otherwise_is_refused_and_fetched_again(bundle: Path, url: str, tmp_path: Path) -> None:
    push(bundle, url)
    system, root = fsspec.core.url_to_fs(url)
    for damaged in (b"short", (bundle / file_names.WEIGHTS).read_bytes()[:-1] + b"?"):
        system.pipe_file(f"{root}/{file_names.WEIGHTS}", damaged)
        with raises("file-damaged", "weights.safetensors: .* differ from the manifest"):
            pull(url, tmp_path / "back.cgb")
        assert not (tmp_path / "back.cgb").exists()
    system.pipe_file(f"{root}/{file_names.WEIGHTS}", (bundle / file_names.WEIGHTS).read_bytes())
    pull(url, tmp_path / "back.cgb")
    assert same(bundle, tmp_path / "back.cgb")


def test_a_hostile_manifest_names_no_path_outside(bundle: Path, url: str, tmp_path: Path) -> None:
    def change(manifest: Manifest) -> Manifest:
        first, *rest = manifest.files
        return replace(manifest, files=(replace(first, path="../../../outside"), *rest))

    push(bundle, url)
    system, root = fsspec.core.url_to_fs(url)
    hostile = write_bundle(tmp_path / "hostile.cgb", change)
    system.pipe_file(f"{root}/{file_names.MANIFEST}", (hostile / file_names.MANIFEST).read_bytes())
    with raises("manifest-invalid", "is no path inside the bundle"):
        pull(url, tmp_path / "back.cgb")


def test_a_damaged_bundle_is_not_pushed(bundle: Path, url: str) -> None:
    (bundle / file_names.PROGRAM).write_bytes(b"something else")
    with raises("file-damaged", "program.pt2"):
        push(bundle, url)
    system, root = fsspec.core.url_to_fs(url)
    assert not system.exists(root)


def test_urls_of_no_known_kind_and_packages_that_are_missing(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises("remote-invalid", "nothing://x/y: Protocol not known"):
        push(bundle, "nothing://x/y")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with raises("extra-missing", "push and pull need fsspec"):
        pull("memory://x/y")


def test_a_replacement_that_ends_at_any_call_leaves_one_bundle_or_none(
    bundle: Path, other: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves no mixture of files, and no signature of the other bundle. The next push continues and leaves no temporary
    files."""
    changes, stop = ("put_file", "mv", "rm_file", "pipe_file", "rm", "makedirs"), 0
    system, root = fsspec.core.url_to_fs(url)
    while True:
        push(bundle, url, replace=True)
        stop, calls = stop + 1, iter(range(1, 1000))
        with monkeypatch.context() as patch:
            for method in changes:
                breaking(patch, url, method, lambda number, path: next(calls) >= stop)  # noqa: B023
            try:
                push(other, url, replace=True)
                break
            except BuildError as error:
                assert error.code == "remote-failed"
        try:
            pull(url, tmp_path / "back.cgb", replace=True)
            assert same(tmp_path / "back.cgb", bundle) or same(tmp_path / "back.cgb", other)
        except BundleError as error:
            assert error.code == "not-a-bundle"
        push(other, url, replace=True)
        pull(url, tmp_path / "back.cgb", replace=True)
        assert same(tmp_path / "back.cgb", other) and sorted(
            path.removeprefix(f"{root}/") for path in system.find(root)
        ) == manifest_text.list_files(str(other))
    assert stop > 10
