"""Malicious directories with links, pipes, devices and sparse files, and a directory that changes while it is read."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from cgbundle import loader
from cgbundle.call.update import OpenFile
from cgbundle.errors import CgbundleError
from cgbundle.format import archive, file_names
from cgbundle.format.archive import Archive
from cgbundle.format.limits import HELD_BYTES
from cgbundle.validate import bundle as verify
from cgbundle.validate import contents
from cgbundle.validate.manifest import check_manifest
from cgcompile.bundle import manifest_text
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.tiny_bundle import HOST_FILE, write_bundle
from tests.helpers.raising import raises

FILES = [file_names.WEIGHTS, file_names.SELF_TEST, file_names.PROGRAM, HOST_FILE]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "tiny.cgb")


def link_away(path: Path) -> None:
    shutil.move(path, path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def link_inside(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved").name)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def socket(path: Path) -> None:
    import socket as sockets

    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path must be short
    try:
        sockets.socket(sockets.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


REPLACEMENTS = [link_away, link_inside, loop, pipe, device, socket]
"""Functions that replace a file by something that is not a regular file."""


@pytest.mark.parametrize("level", contents.LEVELS)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("replace_file", REPLACEMENTS)
def test_a_file_that_is_not_regular_is_refused_at_once(
    bundle: Path, replace_file: Callable[[Path], None], name: str, level: str
) -> None:
    replace_file(bundle / name)
    begun = time.thread_time()
    with raises("file-damaged", match=f"^{name}: (not a file|a symbolic link, which|cannot be read)") as caught:
        verify.check_bundle(Archive(str(bundle)), level)
    assert time.thread_time() - begun < 1 and "\n" not in str(caught.value)


@pytest.mark.parametrize("replace_file", REPLACEMENTS)
def test_a_folder_whose_manifest_is_not_a_regular_file_is_no_bundle(bundle: Path, replace_file: Callable[[Path], None]) -> None:
    replace_file(bundle / file_names.MANIFEST)
    for use in (loader.load, lambda path: archive.read_manifest(str(path))):
        with raises("not-a-bundle", match=r"its manifest\.json is (not a file|a symbolic link|cannot be read)"):
            use(bundle)


def test_a_folder_that_is_a_link_is_refused(bundle: Path) -> None:
    link_away(bundle / "host")
    with raises("file-damaged", match=f"^{HOST_FILE}: a symbolic link"):
        loader.load(bundle)


def test_the_bundles_own_path_may_be_a_link(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(bundle)
    verify.check_bundle(Archive(str(tmp_path / "current")))


@pytest.mark.parametrize("path", ["a" * 5000, "a/" * 2500, "a\0b"])
def test_an_invalid_path_is_no_bundle(path: str) -> None:
    with raises("not-a-bundle") as caught:
        loader.load(path)
    assert len(str(caught.value)) < 300 and "\0" not in str(caught.value)


def test_a_link_to_itself_or_to_nothing_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nothing").symlink_to("void")
    for name in ("loop", "nothing"):
        with raises("not-a-bundle"):
            loader.load(tmp_path / name)


@pytest.mark.parametrize("size", [4 << 30, HELD_BYTES + 1])
def test_sparse_files_are_refused_unread(bundle: Path, size: int) -> None:
    manifest = archive.read_manifest(str(bundle))
    os.truncate(bundle / HOST_FILE, size)
    files = tuple(replace(row, bytes=size) if row.path == HOST_FILE else row for row in manifest.files)
    tiny_bundle.seal(bundle, replace(manifest, files=files))
    begun = time.thread_time()
    with raises("file-damaged", match=f"^{HOST_FILE}: {size} bytes, more than the limit of {HELD_BYTES}"):
        verify.check_bundle(Archive(str(bundle)))
    os.truncate(bundle / file_names.MANIFEST, size)
    with raises("manifest-invalid", match="more than the limit"):
        loader.load(bundle)
    assert time.thread_time() - begun < 1


# --- a bundle that is replaced -----------------------------------------------------------------------------------------


def test_an_open_bundle_is_still_read_after_its_path_was_replaced(bundle: Path, tmp_path: Path) -> None:
    opened = Archive(str(bundle))
    verify.check_bundle(opened, "full")
    held = opened.data(HOST_FILE)
    bundle.rename(tmp_path / "old")
    (write_bundle(tmp_path / "other") / HOST_FILE).write_bytes(b"other")
    (tmp_path / "other").rename(bundle)
    shutil.rmtree(tmp_path / "old")
    assert opened.is_replaced() and opened.data(HOST_FILE) == held
    with closing(opened.mapped(file_names.SELF_TEST)) as mapped:
        assert [name for name in mapped.entries if bytes(mapped.data(name))]


def test_a_bundle_that_is_replaced_while_it_is_checked_is_read_again(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old files are deleted after the reader has read the old manifest. Then it reads the new bundle from its beginning,
    without an error."""
    other = write_bundle(tmp_path / "other")
    original = check_manifest
    seen = []

    def replacing(manifest: object) -> None:
        seen.append(manifest)
        if len(seen) == 1:
            bundle.rename(tmp_path / "old")
            other.rename(bundle)
            shutil.rmtree(tmp_path / "old")
        original(manifest)  # type: ignore[arg-type]

    monkeypatch.setattr(contents, "check_manifest", replacing)
    with pytest.raises(CgbundleError) as caught:  # nothing but the dummy shared object is refused
        loader.load(bundle)
    assert caught.value.code in ("image-invalid", "library-missing") and len(seen) == 2


def test_a_file_that_changes_while_it_is_read_is_refused(bundle: Path) -> None:
    opened = Archive(str(bundle))
    verify.check_bundle(opened, "full")
    opened.check_unchanged()
    with open(bundle / file_names.WEIGHTS, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\7")
    os.utime(bundle / file_names.WEIGHTS, ns=(1, 1))
    with raises("file-damaged", match=r"^weights\.safetensors: was written to while"):
        opened.check_unchanged()


@pytest.mark.parametrize("later", [-1, 1, 10**9, -(10**12)])
@pytest.mark.parametrize("name", [file_names.WEIGHTS, file_names.SELF_TEST, file_names.MANIFEST])
def test_any_change_of_the_modification_time_counts_as_a_change(name: str, later: int, bundle: Path) -> None:
    """A file that replaces another one may be older, so earlier times count too."""
    opened = Archive(str(bundle))
    for file_name in (file_names.WEIGHTS, file_names.SELF_TEST):
        opened.descriptor(file_name)
    checkpoint = OpenFile(str(bundle / name))
    status = (bundle / name).stat()
    opened.check_unchanged()
    checkpoint.check_unchanged()
    os.utime(bundle / name, ns=(status.st_atime_ns, status.st_mtime_ns + later))
    with raises("file-damaged", match=f"^{name}: was written to while"):
        opened.check_unchanged()
    with raises("update-invalid", match="was written to while it was read"):
        checkpoint.check_unchanged()


def test_copied_weights_outlive_the_file_and_the_archive(bundle: Path) -> None:
    before = (bundle / file_names.WEIGHTS).read_bytes()
    opened = Archive(str(bundle), copy_weights=True)
    verify.check_bundle(opened, "full")
    os.truncate(bundle / file_names.WEIGHTS, 0)
    opened.check_unchanged()
    mapped = opened.mapped(file_names.WEIGHTS)
    opened.close()
    assert b"".join(bytes(mapped.data(name)) for name in mapped.entries) == before[-sum(
        entry.end - entry.begin for entry in mapped.entries.values()
    ) :]  # fmt: skip
    mapped.close()


def test_no_descriptor_stays_open(bundle: Path) -> None:
    gc.collect()  # closes files of earlier tests in reference cycles
    before = len(os.listdir("/proc/self/fd"))
    opened = Archive(str(bundle))
    verify.check_bundle(opened, "full")
    opened.close()
    opened.close()
    Archive(str(bundle))  # freed at once, so that its files are closed
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_more_than_a_few_descriptors_are_open_at_once(bundle: Path) -> None:
    """A bundle may have more kernel images than a process may open files."""
    (bundle / "kernels").mkdir()
    for index in range(100):
        data = b"%d" % index
        (bundle / "kernels" / hashlib.sha256(data).hexdigest()).write_bytes(data)
    manifest = archive.read_manifest(str(bundle))
    tiny_bundle.seal(bundle, replace(manifest, files=manifest_text.describe_files(str(bundle))))
    opened, before = Archive(str(bundle)), len(os.listdir("/proc/self/fd"))
    verify.check_bundle(opened, "full")
    assert len(os.listdir("/proc/self/fd")) - before < 8
